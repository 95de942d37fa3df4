"""Tests that every caller gets the error of a writer that fails, and none waits for ever."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import CannotWrite
from megatron_async.store import export as store_export
from megatron_async.store.location import lock_store
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.store.writer import StoreWriter, _Pending
from tests.store.test_compaction import train
from tests.trajectory.builders import STORE, append, expected, prompt, response


class CanceledWhenAsked(Future[int]):
    """A future that is canceled just after it was asked whether it is done."""

    def done(self) -> bool:
        was = super().done()
        self.cancel()
        return was


def test_writer_error_reaches_other_futures_when_one_is_canceled(
    tmp_path: Path,
) -> None:
    (tmp_path / STORE).touch()
    writer = StoreWriter(tmp_path / STORE, 0, lock_store(tmp_path / STORE))
    finished, barrier, job = Future[int](), Future[int](), Future[int]()
    finished.set_result(1)
    futures = (finished, CanceledWhenAsked(), barrier, job)
    pending = _Pending(jobs=[(lambda _: 0, future) for future in futures])
    writer._fail(OSError("the disk is full"), pending)
    for future in (barrier, job):
        with pytest.raises(ComponentFailure, match="the disk is full"):
            future.result(0)
    with pytest.raises(ComponentFailure, match="the disk is full"):
        writer.close()


async def test_compaction_raises_component_failure_when_the_writer_hangs(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    await train(store, 0)
    may_continue = threading.Event()
    await store.checkpoint_finalized(1, [])
    store._writer.stall_seconds = 0.2
    # The compaction's jobs for the writer are queued behind this job.
    store._writer.run(lambda _: may_continue.wait(20))
    with pytest.raises(ComponentFailure, match=r"committed nothing for 0\.2 s"):
        await asyncio.wait_for(store._compactor.finish(), 5)
    store._writer.stall_seconds = 20.0
    may_continue.set()
    await store.close()


async def test_store_keeps_rows_and_ends_its_thread_when_compaction_fails(
    tmp_path: Path,
) -> None:
    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    await train(store, 0)
    assert not store.export_file.parent.exists()
    store.export_file.parent.write_text("a file where the directory should be")
    await store.checkpoint_finalized(1, [])
    late = store.add_group(prompt(), 1).trajectories[0].trajectory_id
    with pytest.raises(CannotWrite, match="export"):
        await store.close()
    assert not store._writer._thread.is_alive()
    reader = StoreReader(tmp_path / STORE)
    assert late in {entry.trajectory_id for entry in reader.summaries()}
    reader.close()


async def test_store_stays_locked_while_the_thread_of_a_closed_store_hangs(
    tmp_path: Path,
) -> None:
    """A write to a network disk may hang for longer than `close` waits for the writer thread."""

    old = TrajectoryStore.open(tmp_path / STORE)
    end_of_write = threading.Event()
    old._writer.stall_seconds = 0.2
    old._writer.run(lambda _: end_of_write.wait(20))
    with pytest.raises(ComponentFailure, match=r"did not end within 0 s"):
        await old.close()
    with pytest.raises(UserError, match="in use by this process, in which an earlier write"):
        TrajectoryStore.open(tmp_path / STORE, lineage=1)
    end_of_write.set()
    old._writer._thread.join(20)
    new = TrajectoryStore.open(tmp_path / STORE, lineage=1)
    await new.close()


async def test_buffered_tokens_are_written_before_close_waits_for_compaction(
    tmp_path: Path,
) -> None:
    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    await train(store, 0)
    running = store.add_group(prompt(), 1).trajectories[0].trajectory_id
    store.begin_request(running)
    append(store, running, 0, 10)
    may_continue = asyncio.Event()

    async def long_compaction(kept: object) -> None:
        await asyncio.wait_for(may_continue.wait(), 20)

    store._compactor._compact = long_compaction  # type: ignore[assignment, method-assign]
    await store.checkpoint_finalized(1, [])
    closing = asyncio.create_task(store.close())
    await asyncio.sleep(0)
    await store.sync()  # The store is still open, because `close` waits for the compaction.
    reader = StoreReader(tmp_path / STORE)
    assert response(reader.trajectory(running)) == expected(running, 10)
    reader.close()
    may_continue.set()
    await closing


def test_store_stays_locked_while_the_export_of_a_closed_store_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    end_of_write = threading.Event()

    def hang(*_: object) -> int:
        assert end_of_write.wait(20)
        return 0

    monkeypatch.setattr(store_export, "write_lines", hang)

    async def scenario() -> None:
        old = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
        await train(old, 0)
        old._writer.stall_seconds = 0.5
        await old.checkpoint_finalized(1, [])
        with pytest.raises(ComponentFailure, match=r"trajectories.jsonl did not end within 0.5 s"):
            await old.close()
        assert not old._writer._thread.is_alive()
        with pytest.raises(UserError, match="in use by this process"):
            TrajectoryStore.open(tmp_path / STORE, lineage=1, step=1)
        end_of_write.set()

    asyncio.run(scenario())  # Returns only once the export thread has ended.
    new = TrajectoryStore.open(tmp_path / STORE, lineage=1, step=1)
    asyncio.run(new.close())


def test_concurrent_waiters_share_one_acknowledgement(tmp_path: Path) -> None:
    async def scenario() -> None:
        store = TrajectoryStore.open(tmp_path / STORE)
        group = store.add_group(prompt(), 300)
        ids = [store.begin_request(t.trajectory_id).trajectory_id for t in group.trajectories]
        barriers = 0
        barrier = store._writer.barrier

        def counted(**how: bool) -> Future[int]:
            nonlocal barriers
            barriers += 1
            return barrier(**how)

        store._writer.barrier = counted  # type: ignore[method-assign]

        async def stream(trajectory_id: int) -> None:
            for start in (0, 64, 128):
                append(store, trajectory_id, start, 64)
                await store.written(trajectory_id)
                assert store._writer.is_committed(store._record(trajectory_id).in_flight)

        await asyncio.gather(*(stream(trajectory_id) for trajectory_id in ids))
        assert 1 <= barriers <= 12  # Although 900 chunks were waited for.
        await store.close()

    asyncio.run(scenario())


async def test_writer_error_reaches_all_waiters_when_one_was_canceled(
    tmp_path: Path,
) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    started, release = threading.Event(), threading.Event()
    store._writer.run(lambda _: started.set() or release.wait(20))
    await asyncio.to_thread(started.wait, 20)
    waiting = [asyncio.create_task(store.sync()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()

    def fails(_: object) -> None:
        raise ValueError("the disk is full")

    failing = store._writer.run(fails)
    release.set()
    results = await asyncio.gather(*waiting, store.sync(), return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(failing.exception(5), ValueError)
    assert isinstance(results[3], ComponentFailure) and "disk is full" in str(results[3])
    with pytest.raises(ComponentFailure, match="disk is full"):
        await store.close()
