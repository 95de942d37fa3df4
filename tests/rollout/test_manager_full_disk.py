"""A manager whose disk is full: a sentence for its trainer, and nothing is left open or running."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import CannotWrite
from megatron_async.rollout.manager import ResumePoint, RolloutManager
from megatron_async.scheduler.record import read_record
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import PolicyVersion
from tests.rollout.stand_ins import Engines, Fixed, manager_of, run, settings
from tests.small_disk import SmallDisk


class Stopped(Engines):
    """Records which engines were ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[int] = []

    async def stop(self, index: int) -> None:
        self.ended.append(index)


async def begun(folder: Path, engines: Engines) -> RolloutManager:
    """With a trainer of lineage 0 attached, and engines that generate."""
    manager = manager_of(folder, settings("async"), engines, Fixed())
    await manager.start()
    await attach(manager, engines, 0)
    return manager


async def attach(manager: RolloutManager, engines: Engines, lineage: int) -> None:
    await manager.attach(ResumePoint(lineage))
    await update(manager, engines, lineage, 0)


async def update(manager: RolloutManager, engines: Engines, lineage: int, number: int) -> None:
    addresses = await manager.begin_update(lineage, number)
    for engine in engines.all:
        engine.set_weights(PolicyVersion(lineage, number))
    await manager.end_update(lineage, number, [a.engine_id for a in addresses], False)
    await manager.verify_update(lineage, number, None, False)


async def failure_of(manager: RolloutManager) -> str:
    """The status once the disk has refused a write."""
    async with asyncio.timeout(20):
        while not (found := manager.status()["failure"]):
            await asyncio.sleep(0.01)
    return str(found)


def test_a_full_disk_is_reported_in_a_sentence_and_stopping_ends_the_engines_all_the_same(
    disk: SmallDisk,
) -> None:
    async def body() -> None:
        engines = Stopped()
        manager = await begun(disk.path, engines)
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
        store = TrajectoryStore.open(disk.path / "store.sqlite", lineage=1)  # its lock is free
        assert store.recovery is None
        await store.close()

    run(body())


def test_a_trainer_that_comes_when_there_is_room_again_goes_on(disk: SmallDisk) -> None:
    """torchrun has restarted the ranks; the failure of the session before is not theirs."""

    async def body() -> None:
        engines = Stopped()
        manager = await begun(disk.path, engines)
        disk.fill()
        await failure_of(manager)
        disk.make_room()
        await attach(manager, engines, 1)
        assert await manager.next_batch(1) is not None
        await manager.stop()

    run(body())


def test_events_that_cannot_be_recorded_leave_the_store_free(disk: SmallDisk) -> None:
    (disk.path / "events").write_text("in the place of the directory")

    async def body() -> None:
        manager = manager_of(disk.path, settings("async"), Stopped(), Fixed())
        await manager.start()
        with pytest.raises(CannotWrite, match=r"events cannot be written: File exists"):
            await manager.attach(ResumePoint(0))
        (disk.path / "events").unlink()
        await manager.attach(ResumePoint(0))
        await manager.stop()

    run(body())


def test_a_record_on_a_full_disk_ends_with_a_whole_line(tmp_path: Path, disk: SmallDisk) -> None:
    async def body() -> None:
        manager = manager_of(tmp_path, settings("async"), engines := Stopped(), Fixed())
        manager._events_directory = disk.path / "events"
        await manager.start()
        await attach(manager, engines, 0)
        disk.fill(leave=3 * 4096)
        with pytest.raises(ComponentFailure, match=r"events/0\S* cannot be written: No space"):
            for number in range(1, 1000):
                await manager.next_batch(0)
                await update(manager, engines, 0, number)
        await manager.stop()
        assert engines.ended == [0]

    run(body())
    whole = [path for path in (disk.path / "events").iterdir() if path.stat().st_size]
    assert whole
    for path in whole:
        assert path.read_bytes().endswith(b"\n")
        _, exchanges = read_record(path)
        list(exchanges)
