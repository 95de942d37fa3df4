"""Tests that a full or read-only disk fails saves and exports with a clear message and no
damage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.checkpoint.convert import hf_to_megatron, megatron_to_hf
from megatron_async.checkpoint.manager import CheckpointManager
from megatron_async.checkpoint.manifest import find_latest
from megatron_async.config.run import CheckpointConfig
from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import CannotWrite
from megatron_async.models.save import save_hf
from megatron_async.trainer.step import PolicyTrainer
from tests.small_disk import SmallDisk, small_disk
from tests.trainer.cases import ragged_batch, settings, single_process, trainer_session


@pytest.fixture
def trainer(model_dir: Path) -> Iterator[PolicyTrainer]:
    with single_process(), trainer_session(settings(model_dir, {"steps": 8})) as found:
        yield found


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 32 << 20) as found:
        yield found


def bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def save(checkpoints: CheckpointManager, trainer: PolicyTrainer) -> None:
    trainer.train_batch(ragged_batch(trainer.step))
    checkpoints.save(trainer, {})
    checkpoints.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.3, 0.9])
def test_failed_save_keeps_previous_checkpoint_when_disk_is_full(
    trainer: PolicyTrainer, disk: SmallDisk, share: float, asynchronous: bool
) -> None:
    """Free space is `share` of what the save needs, so that each case fails at another file."""
    root = disk.path / "checkpoints"
    checkpoints = CheckpointManager(root, CheckpointConfig(asynchronous=asynchronous))
    save(checkpoints, trainer)
    disk.fill(leave=int(share * bytes_of(root)))
    with pytest.raises(ComponentFailure) as failure:
        save(checkpoints, trainer)
    message = str(failure.value)
    assert message.startswith(f"checkpoint of step 2 in {root} could not be written (")
    assert "No space left on device; free space on its file system" in message
    assert (
        message.endswith(f"; the newest finalized checkpoint is {root / 'step_000001'}")
        and "\n" not in message
    )
    assert [path.name for path in root.iterdir()] == ["step_000001"], (
        "the files of the failed save are removed"
    )
    newest = find_latest(root)
    assert newest is not None and newest.step == 1
    disk.make_room()
    save(checkpoints, trainer)
    assert find_latest(root).step == 3  # type: ignore[union-attr]


def test_failed_save_states_the_cause_when_disk_is_read_only(
    trainer: PolicyTrainer, disk: SmallDisk
) -> None:
    root = disk.path / "checkpoints"
    checkpoints = CheckpointManager(root, CheckpointConfig(asynchronous=False))
    save(checkpoints, trainer)
    disk.read_only()
    with pytest.raises(ComponentFailure, match=r"could not be written \(.*Read-only .*; mount"):
        save(checkpoints, trainer)
    assert find_latest(root).step == 1  # type: ignore[union-attr]


def test_failed_export_leaves_no_files_when_disk_is_full(
    trainer: PolicyTrainer, disk: SmallDisk, model_dir: Path
) -> None:
    for leave in (0, 4096, bytes_of(model_dir) // 2):
        disk.fill(leave)
        with pytest.raises(CannotWrite, match=r"hf.* cannot be written: No space left on device;"):
            save_hf(trainer.model, disk.path / "hf", model_dir)
        assert [p.name for p in disk.path.iterdir() if p.name != ".filler"] == []
        disk.make_room()
    save_hf(trainer.model, disk.path / "hf", model_dir)
    disk.read_only()
    with pytest.raises(CannotWrite, match=r"cannot be written: Read-only file system; mount"):
        save_hf(trainer.model, disk.path / "again", model_dir)


def test_failed_conversion_leaves_no_files_when_disk_is_full(
    disk: SmallDisk, model_dir: Path, tmp_path: Path
) -> None:
    source = tmp_path / "megatron"
    hf_to_megatron(model_dir, source)
    conversions: list[Any] = [
        lambda to: hf_to_megatron(model_dir, to),
        lambda to: megatron_to_hf(source, to),
    ]
    for convert in conversions:
        for leave in (0, 8192, bytes_of(model_dir) // 2):
            disk.fill(leave)
            with pytest.raises(CannotWrite, match=r"to\S* cannot be written: No space left on"):
                convert(disk.path / "to")
            assert [p.name for p in disk.path.iterdir() if p.name != ".filler"] == []
            disk.make_room()
