"""The package as a library: fast to import, names as documented, a run in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

import megatron_async
from megatron_async import open_run
from megatron_async.commands import library
from megatron_async.commands.library import import_path_of, train
from megatron_async.config import RunConfig, build_config
from megatron_async.errors import UserError
from megatron_async.launcher.derived import Machine, derive
from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.rewards import Sample
from tests.crash.run import configuration, prepare
from tests.report.test_report import make_run

DOCS = Path(__file__).parents[2] / "docs"
HEAVY = ("torch", "ray", "transformers", "pydantic", "megatron", "numpy")


def own_reward(sample: Sample) -> float:
    return 1.0


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = (
        "import sys, megatron_async as m; assert 'train' in m.__all__; "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_imported_and_no_other() -> None:
    for name in megatron_async.__all__:
        assert getattr(megatron_async, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        megatron_async.trane  # noqa: B018


def test_a_run_opens_in_one_line(tmp_path: Path) -> None:
    run = open_run(make_run(tmp_path, "one"))
    assert run.config.name == "one"
    assert run.metrics[-1]["reward/max"] == 1.0 and len(run.evaluations) > 0
    assert run.accuracy == run.evaluations[-1]["eval/accuracy"] and run.export is None
    (run.path / "hf").mkdir()
    assert run.export == run.path / "hf"
    with closing(run.store()) as store:
        assert store.trajectory(0).reward == 1.0
    with pytest.raises(UserError, match="there is no run"):
        open_run(tmp_path / "nowhere")


SCRIPT = """
from megatron_async import load_config, train

def score(sample) -> float:
    if len(sample.response) > 4 and len(sample.response) % 2 == 0:
        raise ValueError("too long for this reward")
    return float(len(sample.response) % 2)

if __name__ == "__main__":
    run = train(load_config("c.yaml"), reward=score)
    print("rewards", [row["reward/mean"] for row in run.metrics], len(run.config.reward))
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_script_trains_with_a_function_as_reward_and_reads_why_it_fails(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = configuration("sync", "simulated", tmp_path, "scripted", {"steps": 2})
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=360)
    assert done.returncode == 0, done.stderr[-3000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("rewards ")]
    rewards, count = re.fullmatch(r"rewards \[(.*)\] (\d)", line).groups()  # type: ignore[union-attr]
    assert count == "1" and len(rewards.split(", ")) == 2
    assert any(0.0 < float(reward) < 1.0 for reward in rewards.split(", "))
    place = f"ValueError: too long for this reward at {tmp_path / 'script.py'}:6"
    logs = tmp_path / "scripted" / "logs"
    output = " ".join(done.stdout.split())
    assert f"scores have failed, the first by reward score: {place} (log: {logs}/scorer-" in output
    (log,) = logs.glob("scorer-*.log")
    assert f"reward score failed: {place}\nTraceback (most recent call last):" in log.read_text()
    assert re.search(r"failed scores │ +[1-9]\d* of \d+", output)
    assert re.search(
        r"mean training reward \(sampled\), first / last steps │ +[01]\.\d+ / [01]\.\d+", output
    )


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Settings of the runs that a test starts, of which only the directories are made."""
    found: list[RunConfig] = []

    def start_run(config: RunConfig, _what: str) -> RunDirectory:
        found.append(config)
        return RunDirectory.create(config)

    monkeypatch.setattr(library, "start_run", start_run)
    monkeypatch.chdir(tmp_path)
    return found


def test_a_reward_leaves_what_is_not_set_to_be_derived(started: list[RunConfig]) -> None:
    train(build_config({"steps": 3, "eval": {"every_steps": 2}}), reward=own_reward)
    [config] = started
    assert config.steps == 3 and config.reward[0].name.endswith("test_library.py:own_reward")
    assert config.eval.model_fields_set == {"every_steps"}
    assert "schedule" not in config.explicit, "so that another preset takes effect at a resume"
    assert config.explicit["reward"].endswith("test_library.py:own_reward")
    on_a_gpu = derive(config, Machine("cuda", "H100", 80e9, cores=32)).config
    assert on_a_gpu.engines.max_total_tokens is None, "the default is a laptop's"


def test_settings_come_by_name_over_a_file_a_mapping_or_a_config(
    started: list[RunConfig], tmp_path: Path
) -> None:
    low = {"steps": 3, "model": {"path": "there", "dtype": "float32"}}
    (tmp_path / "low.yaml").write_text(yaml.safe_dump(low))
    dotted: dict[str, Any] = {"model.path": tmp_path, "schedule.preset": "sync"}
    ways: list[Any] = ["low.yaml", tmp_path / "low.yaml", low, build_config(low)]
    for number, way in enumerate(ways):
        train(way, steps=7, name=f"run{number}", **dotted)
    expected = build_config(
        {
            "steps": 7,
            "schedule": {"preset": "sync"},
            "model": {"path": str(tmp_path), "dtype": "float32"},
        }
    )
    for config in started:
        assert config.model_dump(exclude={"name"}) == expected.model_dump(exclude={"name"})
        assert open_run(RunDirectory.of(config).path).config.schedule == expected.schedule
    with pytest.raises(UserError, match=r"unknown setting step "):
        train(low, step=7)
    with pytest.raises(UserError, match=r"settings are text, numbers.*not function"):
        train(low, name=own_reward)


def test_an_import_path_begins_where_the_script_runs(
    started: list[RunConfig], tmp_path: Path
) -> None:
    train({}, reward="mine.py:score")
    assert started[0].reward[0].name == f"{tmp_path}/mine.py:score"


def test_a_reward_is_named_by_its_file_so_that_other_processes_can_import_it() -> None:
    assert import_path_of(own_reward) == f"{Path(__file__).resolve()}:own_reward"
    for unreachable in (lambda prompt, response: 1.0, eval("lambda p, r: 1.0"), 3):
        with pytest.raises(UserError, match="which other processes cannot import"):
            import_path_of(unreachable)  # type: ignore[arg-type]
