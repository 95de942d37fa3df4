"""Tests which trajectories compaction removes from the database, when, and how it exports them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import UserError
from megatron_async.store import buffers, compaction, export
from megatron_async.store.compaction import delete_chunks_or_turns
from megatron_async.store.export import find, write_lines
from megatron_async.store.reader import StoreReader
from megatron_async.store.schema import Kind
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import DropReason, FinishReason, PolicyVersion
from tests.trajectory.builders import (
    STORE,
    V0,
    append,
    current,
    expected,
    prompt,
    response,
    scored_group,
    snapshot,
)


def exported(path: Path) -> list[dict[str, Any]]:
    file = path / "export" / "trajectories.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


async def train(store: TrajectoryStore, step: int, size: int = 2, count: int = 100) -> None:
    group = await scored_group(store, size, count, PolicyVersion(store.lineage, step))
    store.mark_batched([group.group_id], step)


async def checkpoint(store: TrajectoryStore, step: int, kept: Sequence[PolicyVersion] = ()) -> None:
    await store.sync(durable=True)
    await store.checkpoint_finalized(step, kept)
    await store._compactor.finish()


async def test_consumed_trajectories_are_exported_after_configured_checkpoints(
    tmp_path: Path,
) -> None:
    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=2))
    for step in range(4):
        await train(store, step)
        await checkpoint(store, step + 1, [PolicyVersion(0, step)])
    # The second newest checkpoint is that of step 3, as is the oldest kept checkpoint. So batches
    # 0, 1 and 2 can be removed.
    assert [line["trajectory_id"] for line in exported(tmp_path)] == [0, 1, 2, 3, 4, 5]
    assert store.counts()["batched"] == 8
    with pytest.raises(LookupError, match="group 0"):
        store.load_group(0)
    line = exported(tmp_path)[3]
    assert line["batch"] == {"lineage": 0, "step": 1}
    assert line["segments"][0]["token_ids"] == expected(3, 100)
    assert line["segments"][0]["version"] == "0.1"
    assert (line["reward"], line["complete"], line["drop_reason"]) == (3.0, True, None)
    assert line["prompt"] == {
        "token_ids": prompt().token_ids.tolist(),
        "payload": {"answer": 0},
        "priority": 0,
    }
    await store.close()
    again = TrajectoryStore.open(tmp_path / STORE, lineage=1, step=4)
    assert again.counts()["batched"] == 8
    assert again.add_group(prompt(), 1).trajectories[0].trajectory_id == 8
    await again.close()


async def test_compaction_keeps_groups_that_a_checkpoint_of_an_abandoned_lineage_needs(
    tmp_path: Path,
) -> None:
    settings = StoreConfig(compact_after_checkpoints=1)
    store = TrajectoryStore.open(tmp_path / STORE, settings)
    for step in range(4):
        await train(store, step)
    await store.close()
    second = TrajectoryStore.open(tmp_path / STORE, settings, lineage=1, step=2)
    # Groups 2 and 3 are scored again. On this lineage they become batches 3 and 2.
    second.mark_batched([3], 2)
    second.mark_batched([2], 3)
    await checkpoint(second, 4, [PolicyVersion(0, 3), PolicyVersion(1, 4)])
    # Group 3 is not consumed at the kept checkpoint 0.3.
    assert {line["group_id"] for line in exported(tmp_path)} == {0, 1, 2}
    await second.close()
    third = TrajectoryStore.open(tmp_path / STORE, settings, lineage=2, step=3, parent=0)
    assert [g.group_id for g in third.unconsumed_groups()] == [3]
    await third.close()
    with pytest.raises(UserError, match=r"checkpoint 0\.1 cannot be resumed from"):
        TrajectoryStore.open(tmp_path / STORE, settings, lineage=3, step=1, parent=0)


async def test_compaction_ignores_checkpoints_of_a_lost_lineage(
    tmp_path: Path,
) -> None:
    """The database may have been lost, or replaced by a replica older than that lineage."""
    settings = StoreConfig(compact_after_checkpoints=1)
    store = TrajectoryStore.open(
        tmp_path / STORE, settings, lineage=3, step=10, parent=2, position=50
    )
    for step in (10, 11):
        await train(store, step)
        await checkpoint(store, step + 1, [PolicyVersion(2, 10)])
    assert exported(tmp_path)
    await store.close()


async def test_dropped_trajectories_are_exported_with_their_reason(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    await train(store, 0)
    store.drop_batch(0, DropReason.NONFINITE)
    await train(store, 0)
    waiting = await scored_group(store)
    store.drop(waiting.trajectories[0].trajectory_id, DropReason.STALE)
    await checkpoint(store, 1)
    lines = exported(tmp_path)
    assert [line["drop_reason"] for line in lines] == ["nonfinite", "nonfinite", None, None]
    with closing(StoreReader(tmp_path / STORE)) as reader:
        assert reader.exported().dropped == {"nonfinite": 2}
    assert store.counts()["dropped"] == 3
    assert [g.group_id for g in store.unconsumed_groups()] == [waiting.group_id]
    await store.close()


async def test_drop_reason_is_exported_when_its_write_is_still_queued(
    tmp_path: Path,
) -> None:
    """The export reads the database, while the drops to plan from are in memory already."""

    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    group = await scored_group(store, 2)
    await store.sync(durable=True)
    await store.checkpoint_finalized(0, [])
    await store._compactor.finish()
    started = threading.Event()
    busy = store._writer.run(lambda _: (started.set(), time.sleep(0.5)))
    await asyncio.to_thread(started.wait, 10)
    for trajectory in group.trajectories:
        store.drop(trajectory.trajectory_id, DropReason.STALE)
    store._compactor.start([PolicyVersion(0, 0)])
    await store._compactor.finish()
    assert busy.done()
    assert [line["drop_reason"] for line in exported(tmp_path)] == ["stale", "stale"]
    await store.close()


async def test_export_lines_are_cut_off_when_their_removal_was_not_committed(
    tmp_path: Path,
) -> None:
    settings = StoreConfig(compact_after_checkpoints=1)
    store = TrajectoryStore.open(tmp_path / "run" / STORE, settings)
    await train(store, 0)
    await checkpoint(store, 1)
    await train(store, 1)
    await store.sync()
    copy = snapshot(tmp_path / "run", tmp_path / "crashed")
    with (tmp_path / "crashed" / "export" / "trajectories.jsonl").open("a") as file:
        file.write('{"trajectory_id": 2}\n{"half')
    again = TrajectoryStore.open(copy, settings, lineage=1, step=2)
    assert [line["trajectory_id"] for line in exported(tmp_path / "crashed")] == [0, 1]
    await checkpoint(again, 2)
    assert [line["trajectory_id"] for line in exported(tmp_path / "crashed")] == [0, 1, 2, 3]
    await again.close()
    await store.close()


async def test_commits_and_event_loop_are_not_blocked_while_lines_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_continue = threading.Event()

    def write_when_allowed(*arguments: Any) -> int:
        assert may_continue.wait(30)
        return write_lines(*arguments)

    monkeypatch.setattr(export, "write_lines", write_when_allowed)

    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    await train(store, 0)
    await store.sync(durable=True)
    await store.checkpoint_finalized(1, [])
    await train(store, 1)  # Scoring each trajectory waits for commits.
    assert exported(tmp_path) == []
    may_continue.set()
    await store._compactor.finish()
    assert [line["trajectory_id"] for line in exported(tmp_path)] == [0, 1]
    await store.close()


async def train_in_chunks(store: TrajectoryStore, step: int, size: int, chunks: int) -> None:
    group = store.add_group(prompt(), size)
    for i in (trajectory.trajectory_id for trajectory in group.trajectories):
        store.begin_request(i)
        for chunk in range(chunks):
            append(store, i, 8 * chunk, 8)
        store.end(i, FinishReason.STOP)
        await store.sync()
        await store.set_reward(i, 1.0)
    store.mark_batched([group.group_id], step)


def test_large_group_is_removed_in_pieces_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 7
    monkeypatch.setattr(compaction, "_PARTS_PER_REMOVAL", limit)
    changed: list[int] = []
    commits: list[int] = []

    def counted(connection: sqlite3.Connection, kind: Kind, keys: list[int]) -> None:
        before = connection.total_changes
        delete_chunks_or_turns(connection, kind, keys)
        changed.append(connection.total_changes - before)
        commits.append(store.position())
        store._writer.put(store._state.counters.to_row())

    monkeypatch.setattr(compaction, "delete_chunks_or_turns", counted)

    store: TrajectoryStore

    monkeypatch.setattr(buffers, "CHUNK_TOKENS", 8)

    async def scenario() -> None:
        nonlocal store
        settings = StoreConfig(compact_after_checkpoints=1)
        store = TrajectoryStore.open(tmp_path / STORE, settings)
        await train_in_chunks(store, 0, size=3, chunks=10)
        await checkpoint(store, 1)
        assert store._writer.run(_chunks).result(30) == 0
        await store.close()

    asyncio.run(scenario())
    assert changed == [7, 7, 7, 7, 2]
    assert commits == sorted(set(commits)), "two pieces were removed without a commit between them"
    assert [line["segments"][0]["token_ids"] for line in exported(tmp_path)] == [
        expected(i, 80) for i in range(3)
    ]


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_next_compaction_completes_a_removal_that_a_kill_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pieces: int
) -> None:
    run, killed = tmp_path / "run", tmp_path / "killed"
    monkeypatch.setattr(buffers, "CHUNK_TOKENS", 8)
    settings = StoreConfig(compact_after_checkpoints=1)

    async def until_the_kill() -> None:
        store = TrajectoryStore.open(run / STORE, settings)
        await train_in_chunks(store, 0, size=3, chunks=10)
        live = store.add_group(prompt(), 1).trajectories[0].trajectory_id
        store.begin_request(live)
        append(store, live, 0, 8)
        await checkpoint(store, 1)
        await store.close()

    async def after_the_kill() -> None:
        store = TrajectoryStore.open(killed / STORE, settings, lineage=1, step=1)
        assert store._writer.run(_chunks).result(30) == 31 - 7 * pieces
        assert (store.recovery, store.counts()["batched"]) == (None, 3)
        [group] = store.unconsumed_groups()
        assert response(group.trajectories[0]) == expected(3, 8)
        with pytest.raises(LookupError, match="group 0"):
            store.load_group(0)
        await checkpoint(store, 1, [PolicyVersion(1, 1)])
        assert store._writer.run(_chunks).result(30) == 1
        await store.close()

    def copy_before_removal(connection: sqlite3.Connection, kind: Kind, keys: list[int]) -> None:
        if _chunks(connection) == 31 - 7 * pieces:
            snapshot(run, killed)
        delete_chunks_or_turns(connection, kind, keys)

    with monkeypatch.context() as patched:
        patched.setattr(compaction, "_PARTS_PER_REMOVAL", 7)
        patched.setattr(compaction, "delete_chunks_or_turns", copy_before_removal)
        asyncio.run(until_the_kill())
    asyncio.run(after_the_kill())
    assert [line["trajectory_id"] for line in exported(killed)] == [0, 1, 2]
    assert [line["segments"][0]["token_ids"] for line in exported(killed)] == [
        expected(i, 80) for i in range(3)
    ]


async def test_non_finite_log_prob_is_exported_unchanged(tmp_path: Path) -> None:
    values = np.array([-0.1, -np.inf, -3e-8], dtype=np.float32)

    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    i = store.add_group(prompt(), 1).trajectories[0].trajectory_id
    store.begin_request(i)
    store.append(current(store, i), [1, 2, 3], values, V0, "e0")
    store.end(i, FinishReason.STOP)
    await store.sync()
    await store.set_reward(i, 1.0)
    store.mark_batched([0], 0)
    await checkpoint(store, 1)
    await store.close()
    with closing(StoreReader(tmp_path / STORE)) as reader:
        np.testing.assert_array_equal(find(reader, i).segments[0].logprobs, values)


async def test_database_size_stays_bounded_over_a_long_run(tmp_path: Path) -> None:
    settings = StoreConfig(compact_after_checkpoints=1, export="none")
    store = TrajectoryStore.open(tmp_path / STORE, settings)
    sizes = []
    for step in range(24):
        await train(store, step, size=4, count=4000)
        if step % 3 == 2:
            await checkpoint(store, step + 1)
            sizes.append(store._writer.run(_pages).result(30))
    assert max(sizes) <= sizes[0] * 2
    assert exported(tmp_path) == []
    await store.close()


def _chunks(connection: Any) -> int:
    count: int = connection.execute("SELECT count(*) FROM chunks").fetchone()[0]
    return count


def _pages(connection: Any) -> int:
    count: int = connection.execute("PRAGMA page_count").fetchone()[0]
    return count
