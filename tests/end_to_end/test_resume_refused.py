"""Tests that a run can still be resumed after a resume that trainers refuse, or that is killed
while engines start."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron_async.checkpoint.convert import megatron_to_hf
from megatron_async.run_directory import RunDirectory, RunOutcome
from tests.crash.run import configuration, prepare
from tests.end_to_end.runs import Command, steps_done, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CHANGES = {
    "steps": 2,
    "trainer": {"max_restarts": 0},
    "engines": {"count": 1, "max_restarts": 0},
}


def resumable_state(directory: RunDirectory) -> tuple[bytes, RunOutcome | None, list[str]]:
    """Return what a later resume and `convert` depend on: the config, the outcome and the names of
    the checkpoints."""
    checkpoints = sorted(path.name for path in directory.checkpoints.iterdir())
    return directory.config_file.read_bytes(), directory.outcome(), checkpoints


def test_run_can_be_resumed_after_resumes_that_failed_before_their_start(
    tmp_path: Path,
) -> None:
    prepare(tmp_path)
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump(configuration("async", "simulated", tmp_path, "run", CHANGES)))
    directory = RunDirectory(tmp_path / "run")
    runs: list[Command] = []

    def start(*arguments: str) -> Command:
        runs.append(train(*arguments, log=tmp_path / f"{len(runs)}.log"))
        return runs[-1]

    try:
        assert start("--config", str(file)).process.wait(240) == 0, runs[-1].log.read_text()
        before = resumable_state(directory)
        assert before[1] is RunOutcome.COMPLETE

        again = ("--resume", str(directory.path), "steps=4")
        refused = start(*again, "model.attention_backend=transformer_engine")
        assert refused.process.wait(240) == 2, refused.log.read_text()
        assert "model.attention_backend is transformer_engine" in refused.log.read_text()
        assert (resumable_state(directory), directory.resume_file.exists()) == (before, False)

        killed = start(*again)
        killed.until(lambda: (directory.logs / "engine0.log").exists(), 240)
        killed.kill_everything()
        assert resumable_state(directory) == before
        megatron_to_hf(directory.path, tmp_path / "converted")

        plain = start("--resume", str(directory.path))
        assert plain.process.wait(60) == 0, plain.log.read_text()
        assert "is complete after 2 steps; nothing was started" in plain.log.read_text()

        assert start(*again).process.wait(240) == 0, runs[-1].log.read_text()
        assert (steps_done(directory), directory.outcome()) == (4, RunOutcome.COMPLETE)
        assert RunDirectory.find(directory.path, [])[1].steps == 4
        assert not directory.resume_file.exists()
    finally:
        for run in runs:
            run.kill_everything()
