"""Tests of `megatron-async simulate`, `plan` and `replay` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from typer.testing import CliRunner

from megatron_async.cli import app
from megatron_async.commands.simulate import simulate_command
from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Recorder
from megatron_async.scheduler.warnings import SchedulerWarnings
from megatron_async.simulate import sweep
from megatron_async.simulate.build import simulate
from megatron_async.simulate.planner import Candidate, ranked
from megatron_async.simulate.statistics import Summary
from megatron_async.simulate.sweep import parse_sweep
from megatron_async.trajectory.types import PolicyVersion
from tests.simulate.test_world import SMALL, config, run


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return path


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_simulate_prints_results_and_assumptions(config_file: Path) -> None:
    output = call("simulate", "--config", config_file, "--set", "simulate.steps=8", "--wide")
    for words in (
        "tokens/s",
        "trainer idle",
        "recomputed",
        "To print all assumptions: --assumptions",
    ):
        assert words in output
    assumed = output.split("assumptions that change the results most:\n")[1]
    assert assumed.count("- ") == 3 and "simulate.efficiency.links" not in output
    everything = call("simulate", "--config", config_file, "simulate.steps=8", "--assumptions")
    assert "simulate.efficiency.links: 0.7" in everything


def test_simulate_names_the_preset_whose_settings_are_invalid(config_file: Path) -> None:
    few = ("--config", config_file, "schedule.groups_per_batch=2", "--presets", "all")
    with pytest.raises(UserError, match=r"^schedule\.preset=rapid: .* updates_per_batch is 8 "):
        call("simulate", *few)


def test_simulate_refuses_a_plot_before_it_simulates_when_matplotlib_is_missing(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"--plot is out\.png; .*matplotlib.*\[plot\]"):
        simulate_command(config_file, [], [], "", Path("out.png"))


def test_simulate_sweeps_settings_and_writes_a_plot(config_file: Path, tmp_path: Path) -> None:
    picture = tmp_path / "out.png"
    output = call(
        "simulate", "--config", config_file, "--sweep", "schedule.concurrency=24,40",
        "--sweep", "schedule.kv=keep,recompute", "--plot", picture,
    )  # fmt: skip
    for words in ("concurrency=24 kv=keep", "concurrency=40 kv=recompute"):
        assert words in output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_tables_fit_80_columns_without_wide(config_file: Path) -> None:
    command = ("simulate", "--config", str(config_file), "--set", "simulate.steps=8")
    result = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    rows = [line for line in result.output.splitlines() if line.startswith(("│", "┃", "┏"))]
    assert rows and max(map(len, rows)) <= 80 and "recomputed" not in "".join(rows)
    plan = CliRunner().invoke(
        app, ["plan", *command[1:], "--set", "simulate.gpus=4"], env={"COLUMNS": "80"}
    )
    rows = [line for line in plan.output.splitlines() if line.startswith(("│", "┃", "┏"))]
    assert rows and max(map(len, rows)) <= 80


def test_simulate_prints_other_presets_when_one_fails(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_fails(settings: SimulationConfig) -> Summary:
        if settings.schedule.preset == "copris":
            raise UserError("simulate.steps is too few")
        return simulate(settings)

    monkeypatch.setattr(sweep, "simulate", one_fails)
    command = ["simulate", "--config", str(config_file), "--presets", "sync,copris"]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "80"})
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == (
        "schedule.preset=copris: simulate.steps is too few "
        "(results of 1 of 2 points are printed above)"
    )
    assert "sync" in result.output and "x first" in result.output


def test_ranked_sorts_equally_fast_plans_by_complexity_then_lag() -> None:
    def plan(speed: float, lag: float, ranks: int = 1) -> Candidate:
        summary = Mock(tokens_per_second=speed, lag_mean=lag)
        return Mock(summary=summary, complexity=(ranks, 1), refused=False)

    fast, tied, slow = plan(1000.0, 3.0), plan(990.0, 0.5), plan(900.0, 0.0)
    assert ranked([fast, slow, tied]) == [tied, fast, slow]
    fastest = plan(1005.0, 0.0, ranks=2)
    assert ranked([fastest, fast, slow, tied]) == [tied, fast, fastest, slow]


@pytest.mark.parametrize("text", ["a.b", "a.b=", "=1", "a.b=1,,2"])
def test_parse_sweep_refuses_an_invalid_option(text: str) -> None:
    with pytest.raises(UserError, match="--sweep"):
        parse_sweep(text)


def test_plan_prints_the_best_plan_and_unusable_schedules(config_file: Path) -> None:
    four = ("plan", "--config", config_file, "--set", "simulate.gpus=4")
    output = call(*four, "--presets", "copris", "--top", 2)
    assert "best of " in output and "parallel: {ranks: " in output
    assert (
        "- response lengths: lognormal, median 400 tokens (simulate.lengths), at most 2,000"
        in output
    )
    assert "not compared: schedule.preset rapid: schedule: updates_per_batch is 8" in call(*four)


def recorded(directory: Path) -> Path:
    settings = config("copris")
    (directory / "events").mkdir()
    path = directory / "events" / "0.jsonl"
    with path.open("w") as stream:
        recorder = Recorder(stream, settings.schedule, first_step=0, version=PolicyVersion(0, 0))
        run(settings, recorder)
    return path


def test_replay_reports_equal_actions_for_an_unchanged_record(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    count = len(path.read_text().splitlines()) - 1
    output = call("replay", tmp_path)
    assert f"same actions for {count} events" in output
    assert "batch 11 emitted: 6 groups" in output
    assert "batch 11 emitted" not in call("replay", tmp_path, "--no-timeline")


def test_replay_names_the_first_event_with_other_actions(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    lines = path.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if '"Score"' in line)
    changed = json.loads(lines[index])
    changed["a"] = [action for action in changed["a"] if action[0] != "Score"]
    lines[index] = json.dumps(changed)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(ComponentFailure, match=rf"event {index - 1} .*Score"):
        call("replay", tmp_path)


def test_replay_shows_the_exception_at_its_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is of a run that a defect of the scheduler ended; the current scheduler still has
    the defect."""
    path = recorded(tmp_path)
    lines = path.read_text().splitlines()
    index = next(i for i, line in enumerate(lines) if '["Submit",0,' in line)
    event, error = ev.EngineLoad("engine-0", 0.5, 3), "LookupError('a defect')"
    monkeypatch.setattr(SchedulerWarnings, "load", Mock(side_effect=LookupError("a defect")))
    line = json.dumps({"e": ["EngineLoad", "engine-0", 0.5, 3], "a": [["Raised", error]]})
    path.write_text("\n".join([*lines[: index + 1], line]) + "\n")
    output = call("replay", tmp_path)
    assert f"{index:>9}  {event}: the scheduler raised {error}" in output
    assert (
        f"event {index} ({event}) makes the scheduler raise\nTraceback" in output
        and "in step" in output
    )
    assert f"same actions for {index + 1} events; 1 of them raised the same error" in output


def test_replay_names_the_setting_or_lineage_when_nothing_is_recorded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="record_events"):
        call("replay", tmp_path)
    recorded(tmp_path)
    with pytest.raises(UserError, match="--lineage is 3"):
        call("replay", tmp_path, "--lineage", 3)
