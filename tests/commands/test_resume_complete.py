"""A run that has trained all its steps: a resume without more of them starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.commands import train
from megatron_async.commands.launch import Cluster, launch_run
from megatron_async.config import build_config
from megatron_async.run_directory import RunDirectory, RunOutcome


@pytest.mark.parametrize("by", ["train", "launch"])
@pytest.mark.parametrize("overrides", [[], ["steps=3"], ["optimizer.lr=1e-5"]])
def test_a_complete_run_is_named_with_the_remedy_and_nothing_is_started(
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
    assert "run is complete after 4 steps, nothing is started: set steps to more" in out
    after = {file.name: file.read_bytes() for file in directory.path.iterdir() if file.is_file()}
    assert {name: after[name] for name in before} == before


def test_more_steps_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = build_config({"root": str(tmp_path), "name": "run", "steps": 4})
    directory = RunDirectory.of(config)
    directory.path.mkdir()
    directory.save_config(config)
    directory.report_outcome(RunOutcome.COMPLETE)

    def checked(settings: object, _: object) -> None:
        raise LookupError(settings)

    monkeypatch.setattr(train, "_checked", checked)
    with pytest.raises(LookupError, match="steps=5"):
        train.resume_command(directory.path, ["steps=5"], None)
