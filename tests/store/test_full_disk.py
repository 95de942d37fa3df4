"""Tests a store on a disk that fills up or is read-only.

The user gets a message with the remedy, and no acknowledged trajectory is lost.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from contextlib import closing
from pathlib import Path

import pytest

from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import CannotWrite
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import FinishReason, PolicyVersion, TrajectoryState
from tests.small_disk import SmallDisk
from tests.trajectory.builders import STORE, append, expected, prompt, response, scored_group

SETTINGS = StoreConfig()
COUNT = 300
SEEDS = 20
REMEDY = r"; (free space on|check) its file system"


async def generate_until_full(store: TrajectoryStore, finished: list[int]) -> None:
    """Generate trajectories until the store raises an error, which is not caught.

    The id of each trajectory is added to `finished` once the store has acknowledged its end.
    """
    while True:
        for trajectory in store.add_group(prompt(), 4).trajectories:
            i = trajectory.trajectory_id
            store.begin_request(i)
            for start in range(0, COUNT, 50):
                append(store, i, start, 50)
                await store.written(i)
            store.end(i, FinishReason.STOP)
            await store.sync()
            finished.append(i)


def resume_on_a_full_disk(path: Path) -> None:
    """Resume the run, and check the error message if the full disk causes an error.

    An error may come at once or with the first transaction, unless that transaction just fits.
    """

    async def resume() -> None:
        store = TrajectoryStore.open(path, SETTINGS, lineage=1)
        assert store.recovery is None
        await store.close()

    try:
        asyncio.run(resume())
    except (UserError, ComponentFailure) as error:
        assert re.search(r"cannot be (written|opened): .*", str(error))
        assert re.search(REMEDY, str(error))


def assert_kept(path: Path, finished: list[int]) -> None:
    with closing(StoreReader(path)) as reader:
        for i in finished:
            found = reader.trajectory(i)
            assert (found.state, response(found)) == (TrajectoryState.FINISHED, expected(i, COUNT))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_acknowledged_trajectories_are_kept_when_the_disk_fills_up(
    disk: SmallDisk, seed: int
) -> None:
    """With each seed the disk fills up during another write: of a page, the log or its index."""
    path = disk.path / STORE
    finished: list[int] = []

    async def fill_up() -> None:
        store = TrajectoryStore.open(path, SETTINGS)
        disk.fill(leave=random.Random(seed).randrange(1 << 21))
        with pytest.raises(ComponentFailure) as failure:
            await generate_until_full(store, finished)
        assert str(failure.value).startswith(f"trajectory store {path} cannot be written: ")
        assert re.search(REMEDY, str(failure.value))
        with pytest.raises(ComponentFailure):
            await store.close()

    async def continue_run() -> None:
        store = TrajectoryStore.open(path, SETTINGS, lineage=1)
        assert store.recovery is None, "a full disk was taken for damage"
        await scored_group(store)
        await store.close()

    asyncio.run(fill_up())
    disk.fill()
    resume_on_a_full_disk(path)
    disk.make_room()
    assert_kept(path, finished)
    asyncio.run(continue_run())
    assert_kept(path, finished)


async def test_export_is_written_whole_after_an_attempt_on_a_full_disk(
    disk: SmallDisk,
) -> None:
    """The second attempt is in the same process; it removes what the first attempt has left."""
    path = disk.path / STORE
    export = disk.path / "export" / "trajectories.jsonl"
    settings = StoreConfig(compact_after_checkpoints=1)

    store = TrajectoryStore.open(path, settings)
    group = await scored_group(store, size=8, count=4000)
    store.mark_batched([group.group_id], 0)
    await store.sync(durable=True)
    disk.fill(leave=120_000)
    await store.checkpoint_finalized(1, [PolicyVersion(0, 1)])
    with pytest.raises(CannotWrite, match=f"^{export} cannot be written: No space left"):
        await store._compactor.finish()
    disk.make_room()
    group = await scored_group(store)
    store.mark_batched([group.group_id], 1)
    await store.sync(durable=True)
    await store.checkpoint_finalized(2, [PolicyVersion(0, 2)])
    await store.close()
    lines = [json.loads(line) for line in export.read_text().splitlines()]
    assert [line["trajectory_id"] for line in lines] == list(range(10))
    with closing(StoreReader(path)) as reader:
        assert reader.summaries() == []


def test_open_raises_user_error_when_the_disk_is_read_only(disk: SmallDisk) -> None:
    path = disk.path / STORE

    async def use() -> None:
        store = TrajectoryStore.open(path, SETTINGS)
        await scored_group(store)
        await store.close()

    disk.read_only()
    with pytest.raises(UserError, match=f"cannot be made in {disk.path}: Read-only .*; mount"):
        TrajectoryStore.open(path, SETTINGS)
    disk.writable()
    asyncio.run(use())
    disk.read_only()
    with pytest.raises(UserError, match="cannot be written: Read-only file system; mount"):
        TrajectoryStore.open(path, SETTINGS, lineage=1)
    with pytest.raises(UserError, match=f"cannot be made in {disk.path}: Read-only .*; mount"):
        TrajectoryStore.open(disk.path / "new" / STORE, SETTINGS)
