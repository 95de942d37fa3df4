"""Tests that the store keeps the tree of an episode's turns through kills, restarts and exports."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from megatron_async.algorithms.algorithm import build_algorithm
from megatron_async.algorithms.device_batch import DeviceBatch
from megatron_async.config import build_config
from megatron_async.config.rollout import StoreConfig
from megatron_async.store.episodes import TurnOutcome
from megatron_async.store.export import find
from megatron_async.store.reader import StoreReader
from megatron_async.store.records import SupersededRequest
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import (
    DropReason,
    FinishReason,
    PolicyVersion,
    Prompt,
    Trajectory,
    TrajectoryState,
)
from tests.store.test_store import content
from tests.trajectory.builders import STORE

NO_PROMPT = Prompt(np.zeros(0, np.int32), "game", {"seed": 1})
V1 = PolicyVersion(0, 1)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def play(
    store: TrajectoryStore,
    i: int,
    context: list[int],
    answer: list[int],
    *,
    parent: int | None,
    before: TurnOutcome | None = None,
    version: PolicyVersion = V1,
) -> None:
    """Store one turn of trajectory `i`: the environment's tokens, then the policy's response."""
    call = store.episodes.begin_step(i)
    messages = user(f"turn after {parent}")
    store.episodes.begin_turn(
        call, context, messages, parent=parent, state=b"state", outcome=before
    )
    request = store.begin_request(i)
    logprobs = -0.01 * np.array(answer)
    store.append(request, answer, logprobs, version, "e0", end=FinishReason.STOP)
    await store.sync()


async def end(store: TrajectoryStore, i: int, outcome: TurnOutcome, reward: float) -> None:
    call = store.episodes.begin_step(i)
    store.episodes.end_episode(call, FinishReason.STOP, outcome)
    await store.sync()
    await store.set_reward(i, reward)


def outcome(text: str, reward: float = 0.0) -> TurnOutcome:
    return TurnOutcome({"text": text, "tool_calls": []}, reward)


async def forked(store: TrajectoryStore) -> int:
    """Store a group of two episodes, and return its id.

    The first episode forks after its first turn; the second has two turns in a row.
    """
    group = store.add_group(NO_PROMPT, 2)
    one, two = (trajectory.trajectory_id for trajectory in group.trajectories)
    await play(store, one, [1, 2], [3, 4], parent=None)
    await play(store, one, [5], [6, 7], parent=0, before=outcome("a", 0.5))
    await play(store, one, [8, 9], [10], parent=0, before=outcome("b"))
    await end(store, one, outcome("c", 1.0), 1.5)
    await play(store, two, [1, 2], [11], parent=None)
    await play(store, two, [12], [13], parent=0, before=outcome("d"))
    await end(store, two, outcome("e"), 0.0)
    return group.group_id


def shape(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    return [(b.token_ids.tolist(), b.mask.tolist()) for b in trajectory.branches()]


FORK = [
    ([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 0, 1, 1]),
    ([1, 2, 3, 4, 8, 9, 10], [0, 0, 0, 0, 0, 0, 1]),
]
LINE = [([1, 2, 11, 12, 13], [0, 0, 1, 0, 1])]


async def test_forked_episode_is_packed_and_exported(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    group_id = await forked(store)
    group = store.load_group(group_id)
    store.mark_batched([group_id], 1)
    await store.sync(durable=True)
    batch = pack_groups([group], step=1, lineage=0, branch_points={})
    assert batch.token_ids_T.tolist() == [t for ids, _ in [*FORK, *LINE] for t in ids]
    assert batch.loss_mask_T.tolist() == [m for _, mask in [*FORK, *LINE] for m in mask]
    assert batch.cu_seqlens_S1.tolist() == [0, 7, 14, 19]
    assert batch.trajectory_ids_S.tolist() == [0, 0, 1]
    assert batch.rewards_S.tolist() == [1.5, 1.5, 0.0]
    assert batch.prompt_lengths_S.tolist() == [2, 2, 2]
    by_policy = [1 if t in (3, 4, 6, 7, 10, 11, 13) else -1 for t in batch.token_ids_T]
    assert batch.version_T.tolist() == by_policy, "context that the policy wrote keeps its version"
    assert batch.first_E.tolist() == [0, 2]

    algorithm = build_algorithm(build_config({"algorithm": {"recipe": "copris"}}))
    prepared, _ = algorithm.prepare(DeviceBatch.of(batch))
    assert prepared.advantages_T is not None
    std = np.std([1.5, 0.0], ddof=1) + 1e-6
    expected = np.repeat([0.75 / std, -0.75 / std], [14, 5])
    np.testing.assert_allclose(prepared.advantages_T.numpy(), expected)

    await store.checkpoint_finalized(2, [])
    await store.close()
    with closing(StoreReader(tmp_path / STORE)) as reader:
        assert not reader.contains(0)
        exported = find(reader, 0)
        assert shape(exported) == FORK
        assert [turn.parent for turn in exported.turns] == [None, 0, 0]
        assert [turn.reward for turn in exported.turns] == [0.5, 0.0, 1.0]
        assert [turn.answer and turn.answer["text"] for turn in exported.turns] == ["a", "b", "c"]
        assert exported.turns[1].messages == user("turn after 0")
        assert exported.turns[2].end is FinishReason.STOP
        assert exported.branches()[1].versions == (None, None, V1, V1, None, None, V1)
        assert exported.branches()[0].logprobs.tolist() == pytest.approx(
            [0, 0, -0.03, -0.04, 0, -0.06, -0.07]
        )
        assert shape(find(reader, 1)) == LINE
    with closing(sqlite3.connect(tmp_path / STORE)) as connection:
        assert connection.execute("SELECT count(*) FROM turns").fetchone() == (0,)
        assert connection.execute("SELECT count(*) FROM chunks").fetchone() == (0,)


@pytest.mark.parametrize("written", [10**30, "\ud800", [[[[1e300, None]]]], float("inf")])
async def test_any_tool_call_argument_is_exported_unchanged(
    tmp_path: Path, written: object
) -> None:
    answer = {"text": "", "tool_calls": [{"name": "add", "arguments": {"a": written}}]}

    store = TrajectoryStore.open(tmp_path / STORE, StoreConfig(compact_after_checkpoints=1))
    group = store.add_group(NO_PROMPT, 1)
    await play(store, 0, [1, 2], [3, 4], parent=None)
    await end(store, 0, TurnOutcome(answer, 1.0), 1.0)
    store.mark_batched([group.group_id], 1)
    await store.sync(durable=True)
    await store.checkpoint_finalized(2, [])
    await store.close()
    with closing(StoreReader(tmp_path / STORE)) as reader:
        assert not reader.contains(0)
        assert find(reader, 0).turns[0].answer == answer


def test_episode_is_restored_when_a_kill_follows_any_of_its_commits(tmp_path: Path) -> None:
    """For each commit of a two-turn episode, compare what a resume after a kill finds."""
    found: list[tuple[str, list[tuple[list[int], FinishReason | None, bytes | None]]]] = []

    async def until(moment: int) -> None:
        run = tmp_path / f"run-{moment}"
        store = TrajectoryStore.open(run / STORE)
        store.add_group(NO_PROMPT, 1)
        call = store.episodes.begin_step(0)
        if moment > 0:
            store.episodes.begin_turn(call, [1, 2], user("hi"), parent=None, state=b"one")
        if moment > 1:
            request = store.begin_request(0)
            store.append(request, [3], [-0.1], V1, "e0")
        if moment > 2:
            store.append(request, [4], [-0.1], V1, "e0", end=FinishReason.STOP)
            call = store.episodes.begin_step(0)
        if moment > 3:
            store.episodes.begin_turn(
                call, [5], user("go on"), parent=0, state=b"two", outcome=outcome("x", 0.25)
            )
        if moment > 4:
            request = store.begin_request(0)
            store.append(request, [6], [-0.1], V1, "e0", end=FinishReason.LENGTH)
            call = store.episodes.begin_step(0)
            store.episodes.end_episode(call, FinishReason.LENGTH, outcome("y", 1.0))
        store.flush()
        await store.sync()
        copy = tmp_path / f"killed-{moment}"
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
        await store.close()

    async def after(moment: int) -> Trajectory:
        store = TrajectoryStore.open(tmp_path / f"killed-{moment}" / STORE, lineage=1, step=0)
        trajectory = store.load_trajectory(0)
        await store.close()
        return trajectory

    for moment in range(6):
        asyncio.run(until(moment))
        back = asyncio.run(after(moment))
        turns = [
            ([int(t) for s in back.segments_of(turn) for t in s.token_ids], turn.end, turn.state)
            for turn in back.turns
        ]
        found.append((back.state, turns))
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert found == [
        ("pending", []),
        ("waiting", [([1, 2], None, b"one")]),
        ("partial", [([1, 2, 3], None, b"one")]),
        ("waiting", [([1, 2, 3, 4], stop, b"one")]),
        ("waiting", [([1, 2, 3, 4], stop, None), ([5], None, b"two")]),
        ("finished", [([1, 2, 3, 4], stop, None), ([5, 6], length, None)]),
    ]
    assert (back.turns[0].reward, back.turns[0].answer) == (0.25, {"text": "x", "tool_calls": []})


async def test_environment_reply_is_refused_when_its_call_is_superseded(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    store.add_group(NO_PROMPT, 2)
    late = store.episodes.begin_step(0)
    newer = store.episodes.begin_step(0)
    with pytest.raises(SupersededRequest, match="trajectory 0 is owned by request t0-2;"):
        store.episodes.begin_turn(late, [1], [], parent=None)
    store.episodes.begin_turn(newer, [1], [], parent=None)
    with pytest.raises(ValueError, match="trajectory 0 cannot be called: its newest turn has not"):
        store.episodes.begin_step(0)
    request = store.begin_request(0)
    store.append(request, [2], [-1.0], V1, "e0", end=FinishReason.STOP)
    restarted = store.episodes.begin_step(0)
    store.restart(0)
    with pytest.raises(SupersededRequest, match="trajectory 0 is pending"):
        store.episodes.end_episode(restarted, FinishReason.STOP)
    dropped = store.episodes.begin_step(1)
    store.drop(1, DropReason.ENVIRONMENT)
    with pytest.raises(SupersededRequest, match="trajectory 1 is dropped"):
        store.episodes.begin_turn(dropped, [1], [], parent=None)
    with pytest.raises(ValueError, match="trajectory 1 cannot be called: it is dropped"):
        store.episodes.begin_step(1)
    await store.close()


async def test_restart_deletes_the_turns_of_the_earlier_attempt(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    store.add_group(NO_PROMPT, 1)
    await play(store, 0, [1, 2], [3], parent=None)
    store.restart(0)
    await play(store, 0, [7], [8], parent=None)
    await store.close()
    store = TrajectoryStore.open(tmp_path / STORE, lineage=1, step=0)
    back = store.load_trajectory(0)
    assert back.state is TrajectoryState.WAITING
    assert shape(back) == [([7, 8], [0, 1])]
    await store.close()
    with closing(sqlite3.connect(tmp_path / STORE)) as connection:
        assert connection.execute("SELECT number, attempt FROM turns").fetchall() == [(0, 1)]


async def test_request_input_is_the_path_of_turns_to_the_newest_turn(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    await forked(store)
    store.add_group(Prompt(np.array([70, 71], np.int32), "game"), 1)
    await play(store, 2, [1], [2], parent=None)
    await play(store, 2, [3], [4], parent=0)
    call = store.episodes.begin_step(2)
    store.episodes.begin_turn(call, [5], [], parent=0)
    store.append(store.begin_request(2), [6], [-1.0], V1, "e0")
    prompt, answer = store.load_trajectory(2).input_parts()
    assert np.concatenate(prompt).tolist() == [70, 71, 1, 2, 5]
    assert np.concatenate(answer).tolist() == [6]
    assert store.response_end(2) == (1, 6)
    await store.close()


async def test_damaged_turn_is_detected(tmp_path: Path) -> None:
    store = TrajectoryStore.open(tmp_path / STORE)
    store.add_group(NO_PROMPT, 1)
    await play(store, 0, [1, 2], [3], parent=None)
    await store.close()
    for replica in tmp_path.glob("*replica*"):
        replica.unlink()
    with closing(sqlite3.connect(tmp_path / STORE, isolation_level=None)) as connection:
        connection.execute("UPDATE turns SET reward = 7")
    before = content(tmp_path / STORE)
    again = TrajectoryStore.open(tmp_path / STORE, lineage=1, step=0)
    assert again.recovery is not None
    assert "a row of table turns has a wrong checksum" in again.recovery.message
    assert again.recovery.damaged_file is not None
    assert content(again.recovery.damaged_file) == before
    await again.close()
