"""Tests the public methods of `TrajectoryStore`: states, chunks, resumes, bad input and formats."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.errors import UserError
from megatron_async.store import buffers, schema
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import DropReason, FinishReason, PolicyVersion, TrajectoryState
from tests.trajectory.builders import (
    REPLICA,
    STORE,
    V0,
    append,
    current,
    expected,
    generate,
    prompt,
    response,
    scored_group,
    snapshot,
    tokens_of,
)

S = TrajectoryState


async def test_further_columns_are_restored_with_their_tokens(
    tmp_path: Path,
) -> None:
    routes, teacher = np.dtype([("routes", "<i2", (2, 4))]), np.dtype([("teacher", "<f4")])

    def columns(start: int, count: int, *kinds: np.dtype) -> tuple[np.ndarray, ...]:
        tokens = tokens_of(0, start, count)[0]
        return tuple(tokens.astype("u1").repeat(kind.itemsize).view(kind) for kind in kinds)

    store = TrajectoryStore.open(tmp_path / STORE)
    store.add_group(prompt(), 1)
    request, start, lengths = store.begin_request(0), 0, []
    for kinds, count in (((), 5), ((routes,), 20), ((routes, teacher), 9), ((teacher,), 1)):
        for part in (count - 1, 1):
            values = (*tokens_of(0, start, part), V0, "e0")
            store.append(request, *values, columns=columns(start, part, *kinds))
            start += part
        lengths.append((count, kinds))
    before = store.load_trajectory(0)
    await store.close()
    again = TrajectoryStore.open(tmp_path / STORE, lineage=1)
    for found in (before, again.load_trajectory(0)):
        start = 0
        for part, (count, kinds) in zip(found.segments, lengths, strict=True):
            assert len(part) == count
            assert tuple(column.dtype for column in part.columns) == kinds
            for mine, kind in zip(part.columns, kinds, strict=True):
                np.testing.assert_array_equal(mine, columns(start, count, kind)[0])
            start += count
    await again.close()
    reader = StoreReader(tmp_path / STORE)
    [summary] = reader.summaries()
    assert (summary.tokens, summary.versions) == (35, (V0,))
    reader.close()


async def test_trajectory_is_restored_as_it_was_written(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    (trajectory,) = store.add_group(prompt(3), 1).trajectories
    i = trajectory.trajectory_id
    store.begin_request(i)
    append(store, i, 0, 70)
    append(store, i, 70, 5, PolicyVersion(0, 1))  # The weights changed during the request.
    turn = [1, 2], [0.0, 0.0], PolicyVersion(0, 1), "env"
    store.append(current(store, i), *turn, from_environment=True)
    append(store, i, 75, 3, PolicyVersion(0, 1))
    store.end(i, FinishReason.LENGTH)
    await store.sync()
    await store.set_reward(i, 0.5, {"format": 1.0})
    before = store.load_trajectory(i)
    await store.close()

    again = TrajectoryStore.open(tmp_path / STORE, lineage=1)
    after = again.load_trajectory(i)
    await again.close()
    for found in (before, after):
        assert [len(s) for s in found.segments] == [70, 5, 2, 3]
        assert [str(s.version) for s in found.segments] == ["0.0", "0.1", "0.1", "0.1"]
        assert [s.from_environment for s in found.segments] == [False, False, True, False]
        assert [s.engine_id for s in found.segments] == ["e0", "e0", "env", "e0"]
        tokens, logprobs = tokens_of(i, 0, 70)
        np.testing.assert_array_equal(found.segments[0].token_ids, tokens)
        np.testing.assert_array_equal(found.segments[0].logprobs, logprobs)
        assert found.state is S.SCORED
        assert found.finish_reason is FinishReason.LENGTH
        assert (found.reward, found.reward_detail) == (0.5, {"format": 1.0})
        assert found.prompt.payload == {"answer": 3}
        np.testing.assert_array_equal(found.prompt.token_ids, prompt(3).token_ids)


async def test_all_tokens_are_written_when_hundreds_of_requests_end_at_once(tmp_path: Path) -> None:
    """There are more rows than one SQL statement writes."""

    store = TrajectoryStore.open(tmp_path / STORE)
    groups = [store.add_group(prompt(i), 8) for i in range(90)]
    ids = [t.trajectory_id for group in groups for t in group.trajectories]
    for i in ids:
        store.begin_request(i)
        append(store, i, 0, 1 + i % 3)
    for i in ids:
        assert store.response_end(i) == (1 + i % 3, expected(i, 1 + i % 3)[-1])
        store.end_request(current(store, i))
    await store.close()

    again = TrajectoryStore.open(tmp_path / STORE, lineage=1)
    for trajectory in [t for group in again.unconsumed_groups() for t in group.trajectories]:
        i = trajectory.trajectory_id
        assert (trajectory.state, response(trajectory)) == (S.PARTIAL, expected(i, 1 + i % 3))
        assert again.response_end(i) == (1 + i % 3, expected(i, 1 + i % 3)[-1])
    assert again.counts()[S.PARTIAL] == len(ids)
    await again.close()


def on_disk(path: Path) -> dict[int, int]:
    """Return the number of committed tokens of each trajectory, as another process sees them."""
    reader = StoreReader(path)
    try:
        return {s.trajectory_id: s.tokens for s in reader.summaries()}
    finally:
        reader.close()


async def test_sync_is_canceled_when_the_cancellation_comes_as_it_completes(
    tmp_path: Path,
) -> None:
    """A request that ignored its cancellation would add tokens to those of its successor."""

    store = TrajectoryStore.open(tmp_path / STORE)
    waiting = asyncio.create_task(store.sync())
    await asyncio.sleep(0)
    # The barrier of `waiting`, which comes before this one, is then done but not acknowledged.
    store._writer.barrier().result(10)
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await store.close()


async def test_chunk_is_written_when_full_old_or_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffers, "CHUNK_SECONDS", 0.2)
    store = TrajectoryStore.open(tmp_path / STORE)
    i = store.add_group(prompt(), 1).trajectories[0].trajectory_id
    store.begin_request(i)
    append(store, i, 0, 40)
    await store.sync()
    assert on_disk(tmp_path / STORE)[i] == 0
    append(store, i, 40, 24)
    await store.written(i)
    assert on_disk(tmp_path / STORE)[i] == 64
    append(store, i, 64, 1)
    await asyncio.sleep(0.5)
    await store.sync()
    assert on_disk(tmp_path / STORE)[i] == 65
    append(store, i, 65, 2)
    store.flush()
    await store.sync()
    assert on_disk(tmp_path / STORE)[i] == 67
    await store.close()


@pytest.mark.parametrize("count", [3, 64, 200])
async def test_end_is_committed_in_the_transaction_of_the_last_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """A process that is killed at any moment leaves the end and the last tokens, or neither."""

    store = TrajectoryStore.open(tmp_path / "run" / STORE)
    i = store.add_group(prompt(), 1).trajectories[0].trajectory_id
    store.begin_request(i)
    append(store, i, 0, 10)
    store.flush()
    add_chunk, copies = store._writer.add_chunk, []

    def committed_at_once(*arguments: Any) -> int:
        number = add_chunk(*arguments)
        store._writer.barrier().result(10)
        copies.append(snapshot(tmp_path / "run", tmp_path / f"killed{len(copies)}"))
        return number

    monkeypatch.setattr(store._writer, "add_chunk", committed_at_once)
    store.append(current(store, i), *tokens_of(i, 10, count), V0, "e0", end=FinishReason.STOP)
    await store.close()
    assert len(copies) == 1
    again = TrajectoryStore.open(copies[0], lineage=1)
    found = again.load_trajectory(i)
    await again.close()
    assert (found.state, found.finish_reason) == (S.FINISHED, FinishReason.STOP)
    assert response(found) == expected(i, 10 + count)


async def test_trajectories_batched_after_the_restored_checkpoint_are_scored_again(
    tmp_path: Path,
) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    groups = [await scored_group(store) for _ in range(3)]
    for step, group in enumerate(groups):
        store.mark_batched([group.group_id], step)
    assert store.counts()["batched"] == 6
    assert store.unconsumed_groups() == []
    await store.close()

    again = TrajectoryStore.open(tmp_path / STORE, lineage=1, step=1)
    assert [g.group_id for g in again.unconsumed_groups()] == [1, 2]
    first = again.load_trajectory(0)
    assert (first.state, first.batched_step) == (S.BATCHED, 0)
    assert response(first) == expected(0, 100)
    again.mark_batched([2], 1)
    await again.close()

    older = TrajectoryStore.open(tmp_path / STORE, lineage=2, step=0)
    assert [g.group_id for g in older.unconsumed_groups()] == [0, 1, 2]
    await older.close()
    back = TrajectoryStore.open(tmp_path / STORE, lineage=3, step=2, parent=1)
    assert [g.group_id for g in back.unconsumed_groups()] == [1]
    await back.close()
    back = TrajectoryStore.open(tmp_path / STORE, lineage=4, step=2, parent=0)
    assert [g.group_id for g in back.unconsumed_groups()] == [2]
    assert back.branch_points() == {0: 2, 1: 1, 2: 0, 3: 1}
    assert back.lag_number(PolicyVersion(1, 2)) == 1
    await back.close()


async def test_batch_is_stored_when_made_again_as_its_lineage_continues(
    tmp_path: Path,
) -> None:
    """The deletion of the undone batch and the new batch are written in one transaction."""

    store = TrajectoryStore.open(tmp_path / STORE)
    store.mark_batched([(await scored_group(store)).group_id], 0)
    await store.close()  # The trainer never received the batch.

    store = TrajectoryStore.open(tmp_path / STORE, lineage=0, step=0)
    store.mark_batched([0], 0)
    await store.sync()
    await store.close()

    store = TrajectoryStore.open(tmp_path / STORE, lineage=0, step=1)
    assert store.unconsumed_groups() == []
    await store.close()


async def test_mark_batched_accepts_only_complete_groups_and_only_once(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    group = store.add_group(prompt(), 2)
    a, b = (t.trajectory_id for t in group.trajectories)
    await generate(store, a, 10)
    with pytest.raises(ValueError, match=f"trajectory {b} is pending"):
        store.mark_batched([0], 0)
    store.drop(b, DropReason.SCORER)
    store.mark_batched([0], 0)
    with pytest.raises(ValueError, match="has a batch already"):
        store.mark_batched([0], 0)
    with pytest.raises(ValueError, match=f"trajectory {a} is batched"):
        store.mark_batched([0], 1)
    packed = pack_groups([store.load_group(0)], step=0, lineage=0, branch_points={})
    assert packed.trajectory_ids_S.tolist() == [a]
    await store.close()


async def test_state_change_is_refused_when_it_is_not_allowed(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    i = store.add_group(prompt(), 1).trajectories[0].trajectory_id
    with pytest.raises(ValueError, match="is superseded: trajectory 0 is pending"):
        append(store, i, 0, 1)
    with pytest.raises(ValueError, match="cannot become finished"):
        store.end(i, FinishReason.STOP)
        await store.sync()
    with pytest.raises(ValueError, match="is superseded: trajectory 0 is pending"):
        store.end_request(current(store, i))
    store.begin_request(i)
    store.drop(i, DropReason.USER)
    with pytest.raises(ValueError, match="is dropped"):
        store.begin_request(i)
    with pytest.raises(LookupError, match="trajectory 99"):
        store.load_trajectory(99)
    await store.close()


async def test_second_writer_is_refused_but_readers_are_not(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    store.add_group(prompt(), 2)
    await store.sync()
    code = f"""
from pathlib import Path
from megatron_async.errors import UserError
from megatron_async.store.store import TrajectoryStore
from megatron_async.store.reader import StoreReader
from megatron_async.store import buffers, schema
path = Path({str(tmp_path / STORE)!r})
print(len(StoreReader(path).summaries()))
try:
    TrajectoryStore.open(path, lineage=1)
except UserError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    count, refusal = done.stdout.splitlines()
    assert count == "2"
    assert "is in use by process" in refusal and "(trajectory store, started" in refusal
    await store.close()


async def test_invalid_files_and_lineages_are_refused(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE, lineage=3)
    await store.close()
    with pytest.raises(UserError, match="lineage is 2, but"):
        TrajectoryStore.open(tmp_path / STORE, lineage=2)
    with pytest.raises(UserError, match="has no lineage 7"):
        TrajectoryStore.open(tmp_path / STORE, lineage=8, parent=7)
    with pytest.raises(UserError, match=r"trajectory store .* does not exist"):
        StoreReader(tmp_path / "missing.sqlite")
    other = sqlite3.connect(tmp_path / "other.sqlite")
    other.execute("CREATE TABLE t (x)")
    other.commit()
    other.close()
    with pytest.raises(UserError, match="not a trajectory store"):
        TrajectoryStore.open(tmp_path / "other.sqlite")


def content(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as connection:
        return [*connection.iterdump(), *map(str, connection.execute("PRAGMA user_version"))]


@pytest.mark.parametrize("version", [1, schema.FORMAT - 1, schema.FORMAT + 1])
@pytest.mark.parametrize(
    "open_",
    [lambda path: TrajectoryStore.open(path, lineage=1), StoreReader],
    ids=["run", "reader"],
)
async def test_store_of_another_format_is_refused_naming_both_formats(
    tmp_path: Path, version: int, open_: Callable[[Path], object]
) -> None:
    path = tmp_path / STORE

    store = TrajectoryStore.open(path)
    await scored_group(store)
    await store.close()
    (tmp_path / REPLICA).unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {version}")
    before = content(path)
    sentence = rf"has format {version}; this version of megatron_async reads format 8\. Con"
    with pytest.raises(UserError, match=sentence):
        open_(path)
    assert content(path) == before
