"""Tests the package as a library: a fast import, the documented names, and runs started by one
call."""

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


def test_package_import_loads_no_heavy_dependency() -> None:
    code = (
        "import sys, megatron_async as m; assert 'train' in m.__all__; "
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"


def test_package_exports_its_public_names_and_no_other() -> None:
    for name in megatron_async.__all__:
        assert getattr(megatron_async, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        megatron_async.trane  # noqa: B018


def test_open_run_returns_config_metrics_and_store_of_the_run(tmp_path: Path) -> None:
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
def test_script_with_a_reward_function_trains_and_reports_failed_scores(tmp_path: Path) -> None:
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
    cause = f"ValueError: too long for this reward at {tmp_path / 'script.py'}:6"
    logs = tmp_path / "scripted" / "logs"
    output = " ".join(done.stdout.split())
    assert f"scores have failed, the first by reward score: {cause} (log: {logs}/scorer-" in output
    (log,) = logs.glob("scorer-*.log")
    assert f"reward score failed: {cause}\nTraceback (most recent call last):" in log.read_text()
    assert re.search(r"failed scores │ +[1-9]\d* of \d+", output)
    assert re.search(
        r"mean training reward \(sampled\), first / last steps │ +[01]\.\d+ / [01]\.\d+", output
    )


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Replace the start of runs by creating their directories only; return the list to which each
    run's settings are added."""
    found: list[RunConfig] = []

    def start_run(config: RunConfig, _what: str) -> RunDirectory:
        found.append(config)
        return RunDirectory.create(config)

    monkeypatch.setattr(library, "start_run", start_run)
    monkeypatch.chdir(tmp_path)
    return found


def test_train_keeps_unset_settings_derivable_when_a_reward_is_passed(
    started: list[RunConfig],
) -> None:
    train(build_config({"steps": 3, "eval": {"every_steps": 2}}), reward=own_reward)
    [config] = started
    assert config.steps == 3 and config.reward[0].name.endswith("test_library.py:own_reward")
    assert config.eval.model_fields_set == {"every_steps"}
    assert "schedule" not in config.explicit, "another preset must take effect at a resume"
    assert config.explicit["reward"].endswith("test_library.py:own_reward")
    on_a_gpu = derive(config, Machine("cuda", "H100", 80e9, cores=32)).config
    assert on_a_gpu.engines.max_total_tokens is None, "the default is meant for laptops"


def test_train_applies_named_settings_over_file_mapping_and_config(
    started: list[RunConfig], tmp_path: Path
) -> None:
    base = {"steps": 3, "model": {"path": "there", "dtype": "float32"}}
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    dotted: dict[str, Any] = {"model.path": tmp_path, "schedule.preset": "sync"}
    sources: list[Any] = ["base.yaml", tmp_path / "base.yaml", base, build_config(base)]
    for number, source in enumerate(sources):
        train(source, steps=7, name=f"run{number}", **dotted)
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
        train(base, step=7)
    with pytest.raises(UserError, match=r"settings are text, numbers.*not function"):
        train(base, name=own_reward)


def test_train_resolves_import_path_from_the_working_directory(
    started: list[RunConfig], tmp_path: Path
) -> None:
    train({}, reward="mine.py:score")
    assert started[0].reward[0].name == f"{tmp_path}/mine.py:score"


def test_import_path_of_refuses_functions_that_no_process_can_import() -> None:
    assert import_path_of(own_reward) == f"{Path(__file__).resolve()}:own_reward"
    for unreachable in (lambda prompt, response: 1.0, eval("lambda p, r: 1.0"), 3):
        with pytest.raises(UserError, match="which other processes cannot import"):
            import_path_of(unreachable)  # type: ignore[arg-type]
