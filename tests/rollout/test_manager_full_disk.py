"""Tests a manager whose disk is full: its trainer gets an error message, and nothing stays open or
running."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import CannotWrite
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.scheduler.record import read_record
from megatron_async.store.store import TrajectoryStore
from tests.rollout.stand_ins import Engines, settings
from tests.rollout.test_manager import Trainer
from tests.small_disk import SmallDisk


class Stopped(Engines):
    """Launcher that records which engines were stopped."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[int] = []

    async def stop(self, index: int) -> None:
        self.ended.append(index)


def trainer_on(folder: Path) -> tuple[Trainer, Stopped]:
    engines = Stopped()
    return Trainer(folder, settings("async"), None, engines), engines


async def failure_of(manager: RolloutManager) -> str:
    """Wait until the disk has refused a write, and return the failure in the manager's status."""
    async with asyncio.timeout(20):
        while not (found := manager.status()["failure"]):
            await asyncio.sleep(0.01)
    return str(found)


async def test_manager_reports_the_error_and_stops_engines_when_the_disk_is_full(
    disk: SmallDisk,
) -> None:
    trainer, engines = trainer_on(disk.path)
    manager = (await trainer.started()).manager
    disk.fill()
    sentence = await failure_of(manager)
    assert "cannot be written: " in sentence and "; free space on its file system" in sentence
    with pytest.raises(ComponentFailure, match="cannot be written"):
        while True:
            await manager.next_batch(0)
    with pytest.raises(ComponentFailure, match="cannot be written"):
        await manager.stop()
    assert engines.ended == [0]
    disk.make_room()
    # Opening the store succeeds only if its lock is released.
    store = TrajectoryStore.open(disk.path / "store.sqlite", lineage=1)
    assert store.recovery is None
    await store.close()


async def test_new_trainer_continues_when_the_disk_has_free_space_again(disk: SmallDisk) -> None:
    """torchrun has restarted the ranks, which must not get the failure of the previous session."""
    trainer, _ = trainer_on(disk.path)
    await trainer.started()
    disk.fill()
    await failure_of(trainer.manager)
    disk.make_room()
    await trainer.begin(ResumePoint(1))
    assert await trainer.manager.next_batch(1) is not None
    await trainer.manager.stop()


async def test_store_is_unlocked_when_the_event_record_cannot_be_opened(disk: SmallDisk) -> None:
    (disk.path / "events").write_text("in the place of the directory")
    manager = trainer_on(disk.path)[0].manager
    await manager.start()
    with pytest.raises(CannotWrite, match=r"events cannot be written: File exists"):
        await manager.attach(ResumePoint(0))
    (disk.path / "events").unlink()
    await manager.attach(ResumePoint(0))
    await manager.stop()


async def test_event_record_ends_with_a_whole_line_when_the_disk_is_full(
    tmp_path: Path, disk: SmallDisk
) -> None:
    trainer, engines = trainer_on(tmp_path)
    trainer.manager._events_directory = disk.path / "events"
    await trainer.started()
    disk.fill(leave=3 * 4096)
    with pytest.raises(ComponentFailure, match=r"events/0\S* cannot be written: No space"):
        for number in range(1, 1000):
            await trainer.manager.next_batch(0)
            await trainer.publish(0, number)
    await trainer.manager.stop()
    assert engines.ended == [0]
    whole = [path for path in (disk.path / "events").iterdir() if path.stat().st_size]
    assert whole
    for path in whole:
        assert path.read_bytes().endswith(b"\n")
        _, exchanges = read_record(path)
        list(exchanges)
