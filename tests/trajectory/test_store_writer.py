"""The store's writer when it fails or hangs: every waiter hears of it, and none waits for ever."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.store import TrajectoryStore
from megatron_async.trajectory.store_reader import StoreReader
from megatron_async.trajectory.store_writer import StoreWriter, _Pending
from tests.trajectory.builders import STORE, prompt
from tests.trajectory.test_store_compaction import train


class GivenUp(Future[int]):
    """Its waiter gives it up between the question whether it is done and what follows from it."""

    def done(self) -> bool:
        was = super().done()
        self.cancel()
        return was


def test_a_waiter_that_gives_up_meanwhile_does_not_keep_the_error_from_the_others(
    tmp_path: Path,
) -> None:
    writer = StoreWriter(tmp_path / STORE, 0)
    finished, barrier, job = Future[int](), Future[int](), Future[int]()
    finished.set_result(1)
    pending = _Pending(barriers=[finished, GivenUp(), barrier], jobs=[(lambda _: 0, job)])
    writer._fail(OSError("the disk is full"), pending)
    for future in (barrier, job):
        with pytest.raises(ComponentFailure, match="the disk is full"):
            future.result(0)
    with pytest.raises(ComponentFailure, match="the disk is full"):
        writer.close()


def test_a_compaction_that_hangs_ends_with_a_sentence(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
        await train(store, 0)
        go_on = threading.Event()
        await store.checkpoint_finalised(1, [1])
        store._writer._stall_seconds = 0.2
        store._writer.run(lambda _: go_on.wait(20))  # what the compaction asks for comes after it
        with pytest.raises(ComponentFailure, match=r"committed nothing for 0\.2 s"):
            await asyncio.wait_for(store._compactor.finish(), 5)
        store._writer._stall_seconds = 20.0
        go_on.set()
        await store.close()

    asyncio.run(scenario())


def test_a_store_whose_compaction_has_failed_keeps_its_rows_and_leaves_no_thread(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
        await train(store, 0)
        assert not store.export_file.parent.exists()
        store.export_file.parent.write_text("a file where the directory should be")
        await store.checkpoint_finalised(1, [1])
        late = store.add_group(prompt(), 1).trajectories[0].trajectory_id
        with pytest.raises(OSError, match="export"):
            await store.close()
        assert not store._writer._thread.is_alive()
        reader = StoreReader(tmp_path / STORE)
        assert late in {entry.trajectory_id for entry in reader.summaries()}
        reader.close()

    asyncio.run(scenario())
