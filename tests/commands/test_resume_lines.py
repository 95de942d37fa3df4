"""Tests the lines that a resume prints: its first step, the repeated steps and the changed
settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.checkpoint.manifest import step_directory
from megatron_async.commands import train
from megatron_async.commands.launch import Cluster, launch_run
from megatron_async.config import build_config
from megatron_async.errors import UserError
from megatron_async.run_directory import RunDirectory, RunOutcome
from megatron_async.telemetry.metrics import MetricsWriter
from tests.commands.test_rollback import save


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(build_config({"name": "a", "root": str(tmp_path)}))
    with MetricsWriter(directory.metrics_file, lineage=0) as metrics:
        for step in range(25):
            metrics.write(step, {})
    return directory


def test_resume_lines_name_checkpoint_repeated_steps_and_changes(run: RunDirectory) -> None:
    save(run, 0, 20)
    before = build_config({"optimizer": {"lr": 2e-4}})
    after = build_config({"optimizer": {"lr": 5e-5}})
    assert train.resume_lines(run, before, after, None) == [
        "a resumes from checkpoint step_000020, made after step 19",
        "repeated: steps 20 to 24",
        "changed: optimizer.lr 0.0002 → 5e-05",
    ]


@pytest.mark.parametrize("content", [b"weigh", b"weighed"], ids=["truncated", "changed"])
def test_resume_lines_name_older_checkpoint_when_the_newest_is_damaged(
    run: RunDirectory, content: bytes
) -> None:
    save(run, 0, 10)
    save(run, 0, 20)
    (step_directory(run.checkpoints, 20) / "weights").write_bytes(content)
    same = build_config({})
    assert train.resume_lines(run, same, same, None)[0] == (
        "a resumes from checkpoint step_000010, made after step 9"
    )


def test_resume_lines_raise_when_every_checkpoint_is_damaged(run: RunDirectory) -> None:
    save(run, 0, 20)
    (step_directory(run.checkpoints, 20) / "weights").write_bytes(b"weighed")
    same = build_config({})
    with pytest.raises(UserError, match=r"all checkpoints in .*checkpoints are damaged. Restore"):
        train.resume_lines(run, same, same, None)


def test_resume_lines_start_at_step_0_when_there_is_no_checkpoint(run: RunDirectory) -> None:
    same = build_config({})
    assert train.resume_lines(run, same, same, None) == [
        "a resumes from step 0 (there is no checkpoint yet)",
        "repeated: steps 0 to 24",
    ]


@pytest.mark.parametrize("by", ["train", "launch"])
@pytest.mark.parametrize("overrides", [[], ["steps=3"], ["optimizer.lr=1e-5"]])
def test_resume_of_a_complete_run_starts_no_process_and_shows_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: list[str], by: str
) -> None:
    config = build_config({"root": str(tmp_path), "name": "run", "steps": 4})
    directory = RunDirectory.of(config)
    directory.path.mkdir()
    directory.save_config(config)
    directory.report_outcome(RunOutcome.COMPLETE)
    before = {file.name: file.read_bytes() for file in directory.path.iterdir() if file.is_file()}
    if by == "train":
        train.resume_command(directory.path, overrides, None)
        out = capsys.readouterr().out
    else:
        nodes = Cluster(0, None, "1:00:00")
        out = launch_run(None, directory.path, overrides, nodes, slurm=True, dry_run=False)
    assert "run is complete after 4 steps; nothing was started. To train more" in out
    after = {file.name: file.read_bytes() for file in directory.path.iterdir() if file.is_file()}
    assert {name: after[name] for name in before} == before
