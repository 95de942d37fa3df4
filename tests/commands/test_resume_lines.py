"""What a resume prints: where it starts, what it repeats, what was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_async.checkpoint import manifest
from megatron_async.checkpoint.manifest import (
    Manifest,
    SavedLayout,
    finalise,
    hash_file,
    step_directory,
)
from megatron_async.commands import train as command
from megatron_async.commands.sft import own_name
from megatron_async.config import build_config
from megatron_async.errors import UserError
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import MetricsWriter


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(build_config({"name": "a", "root": str(tmp_path)}))
    with MetricsWriter(directory.metrics_file, lineage=0) as metrics:
        for step in range(25):
            metrics.write(step, {})
    return directory


def save(run: RunDirectory, step: int) -> Path:
    """A finalised checkpoint with one file."""
    temporary = run.checkpoints / ".saving"
    temporary.mkdir(parents=True)
    (temporary / "weights").write_bytes(b"weights")
    files = {"weights": hash_file(temporary / "weights")}
    written = Manifest(lineage=0, step=step, layout=SavedLayout(1, 1, 1), files=files)
    return finalise(temporary, step_directory(run.checkpoints, step), written).path


def test_it_names_the_checkpoint_the_steps_and_the_changes(run: RunDirectory) -> None:
    save(run, 20)
    before = build_config({"optimizer": {"lr": 2e-4}})
    after = build_config({"optimizer": {"lr": 5e-5}})
    assert command.resume_lines(run, before, after, None) == [
        "a goes on from checkpoint step_000020, made after step 19",
        "repeated: steps 20 to 24 are trained again",
        "changed: optimizer.lr 0.0002 → 5e-05",
    ]


def test_a_key_is_not_shown(run: RunDirectory) -> None:
    before = build_config({})
    after = build_config({"engines": {"api_key": "secret"}})
    assert command.resume_lines(run, before, after, None)[-1] == "changed: engines.api_key"


@pytest.mark.parametrize("content", [b"weigh", b"weighed"], ids=["cut off", "of other content"])
def test_one_with_a_damaged_file_is_not_the_one_that_is_named(
    run: RunDirectory, content: bytes
) -> None:
    save(run, 10)
    (save(run, 20) / "weights").write_bytes(content)
    same = build_config({})
    assert command.resume_lines(run, same, same, None)[0] == (
        "a goes on from checkpoint step_000010, made after step 9"
    )


def test_one_whose_manifest_is_lost_is_gone_on_from_by_its_copy(run: RunDirectory) -> None:
    (save(run, 20) / "manifest.json").unlink()
    same = build_config({})
    assert command.resume_lines(run, same, same, None) == [
        "a goes on from checkpoint step_000020, made after step 19",
        "repeated: steps 20 to 24 are trained again",
    ]


def test_of_files_that_take_long_to_read_the_line_does_not_promise_that_they_are_intact(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(run, 20)
    same = build_config({})
    for most, promised in ((6, False), (7, True)):
        monkeypatch.setattr(manifest, "_QUICKLY_READ_BYTES", most)
        line = command.resume_lines(run, same, same, None)[0]
        assert line.endswith(
            "step_000020, made after step 19"
            + " (its files are verified as they are read)" * (not promised)
        )


def test_where_every_checkpoint_is_damaged_nothing_starts(run: RunDirectory) -> None:
    (save(run, 20) / "weights").write_bytes(b"weighed")
    same = build_config({})
    with pytest.raises(UserError, match=r"all in .*checkpoints are damaged: restore"):
        command.resume_lines(run, same, same, None)


def test_without_a_checkpoint_it_begins_again(run: RunDirectory) -> None:
    same = build_config({})
    assert command.resume_lines(run, same, same, None) == [
        "a goes on from its beginning (there is no checkpoint yet)",
        "repeated: steps 0 to 24 are trained again",
    ]


def test_sft_and_train_of_one_file_have_directories_of_their_own() -> None:
    config = build_config({"name": "own"})
    assert own_name(config).name == "own-sft"
    assert own_name(build_config({"name": "sft"})).name == "sft"
