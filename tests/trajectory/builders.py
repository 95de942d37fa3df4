"""Provides prompts, tokens and shortcuts for tests of the store."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import (
    FinishReason,
    FloatArray,
    Group,
    IntArray,
    PolicyVersion,
    Prompt,
    RequestKey,
    Trajectory,
)

STORE = "trajectories.sqlite"
REPLICA = "trajectories.replica.sqlite"
V0 = PolicyVersion(0, 0)


def prompt(seed: int = 0) -> Prompt:
    return Prompt(np.arange(seed, seed + 4, dtype=np.int32), "sums", {"answer": seed})


def tokens_of(trajectory_id: int, start: int, count: int) -> tuple[IntArray, FloatArray]:
    """Compute tokens `start` to `start + count` of a trajectory from its id and their index."""
    index = np.arange(start, start + count, dtype=np.int64)
    tokens = (index * 7919 + trajectory_id * 104729) % 50021
    return tokens.astype(np.int32), (-(tokens % 97) / 97).astype(np.float32)


def append(
    store: TrajectoryStore, trajectory_id: int, start: int, count: int, version: PolicyVersion = V0
) -> None:
    tokens = tokens_of(trajectory_id, start, count)
    store.append(current(store, trajectory_id), *tokens, version, "e0")


def current(store: TrajectoryStore, trajectory_id: int) -> RequestKey:
    """Return the running request of a trajectory, or a request that the store does not know."""
    request = store._state.records[trajectory_id].request
    return request or RequestKey(store.lineage, trajectory_id, 0)


async def generate(
    store: TrajectoryStore, trajectory_id: int, count: int, version: PolicyVersion = V0
) -> None:
    """Generate `count` tokens for a pending trajectory, end it, and set its id as its reward."""
    store.begin_request(trajectory_id)
    append(store, trajectory_id, 0, count, version)
    store.end(trajectory_id, FinishReason.STOP)
    await store.sync()
    await store.set_reward(trajectory_id, float(trajectory_id), {"right": 1.0})


async def scored_group(
    store: TrajectoryStore, size: int = 2, count: int = 100, version: PolicyVersion = V0
) -> Group:
    group = store.add_group(prompt(), size)
    for trajectory in group.trajectories:
        await generate(store, trajectory.trajectory_id, count, version)
    return group


def response(trajectory: Trajectory) -> list[int]:
    return [int(token) for segment in trajectory.segments for token in segment.token_ids]


def expected(trajectory_id: int, count: int) -> list[int]:
    return [int(token) for token in tokens_of(trajectory_id, 0, count)[0]]


def snapshot(run: Path, target: Path) -> Path:
    """Copy to `target` the files that a crash would leave now; the store's writer must be idle."""
    shutil.copytree(run, target, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
    return target / STORE
