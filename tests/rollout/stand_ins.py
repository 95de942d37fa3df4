"""Provides stand-ins for tests of the rollout manager: a task, an engine launcher, and a manager
over both."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from megatron_async.config import RunConfig, build_config
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.manager import RolloutManager
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, Prompt, Trajectory

MODEL = SimulatedEngineModel(mean_length=12, step_seconds=0.001, stream_interval=4)


class Fixed:
    """Task of numbered prompts, and a scorer that gives every response the reward 1."""

    stop_token_ids = (2,)
    size = ScorerCount(1)
    failures: Mapping[str, str] = MappingProxyType({})

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        return [Prompt(np.array([5, position + i], np.int32), "fixed") for i in range(count)]

    def eval_prompts(self, count: int, name: str = "heldout") -> list[Prompt]:
        return self.train_prompts(100, count)

    def counts(self, heldout: int) -> tuple[int | None, int]:
        return None, heldout

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        return 1.0, {}


class Engines:
    """Launcher of simulated engines; the first launches raise the errors in `failures`."""

    def __init__(self) -> None:
        self.all: list[SimulatedEngine] = []
        self.failures: list[ComponentFailure] = []

    async def launch(self, index: int) -> SimulatedEngine:
        if self.failures:
            raise self.failures.pop(0)
        self.all.append(SimulatedEngine(f"engine{index}", MODEL))
        return self.all[-1]

    async def alive(self, index: int) -> bool:
        """Return whether the newest engine with this index has not crashed; older ones were
        replaced."""
        own = [e for e in self.all if e.engine_id.partition(".")[0] == f"engine{index}"]
        return not (own or self.all[index:])[-1]._crash_reason

    async def stop(self, index: int) -> None:
        return None


def settings(preset: str, engines: int = 1, max_restarts: int = 0) -> RunConfig:
    return build_config(
        {
            "schedule": {
                "preset": preset,
                "groups_per_batch": 1,
                "group_size": 2,
                "concurrency": 4,
            },
            "steps": 100,
            "trainer": {"wait_for_batch_seconds": 5},
            "engines": {
                "count": engines,
                "max_restarts": max_restarts,
            },
            "eval": {"prompts": 2},
            "weights": {"timeout_seconds": 5},
        }
    )


def manager_of(
    folder: Path, config: RunConfig, engines: Engines, task: Fixed | None = None
) -> RolloutManager:
    """Return a rollout manager whose store and event record are in `folder`."""
    task = task or Fixed()
    return RolloutManager(
        config,
        task=task,  # type: ignore[arg-type]
        scorers=task,
        launcher=engines,
        store_file=folder / "store.sqlite",
        events_directory=folder / "events",
    )


def trajectories_in(folder: Path) -> dict[int, Trajectory]:
    """Return every trajectory in the store of `manager_of(folder, ...)`, by its id."""
    with closing(StoreReader(folder / "store.sqlite")) as reader:
        return {s.trajectory_id: reader.trajectory(s.trajectory_id) for s in reader.summaries()}


def trainer_logprobs(batch: TokenBatch) -> FloatArray:
    """Return the log-probs that a trainer computes if its policy equals that of the simulated
    engines."""
    bounds = pairwise(batch.cu_seqlens_S1.tolist())
    sequences = [batch.token_ids_T[start:end] for start, end in bounds]
    values = [MODEL.logprob(int(t), p) for ids in sequences for p, t in enumerate(ids)]
    return np.asarray(values, np.float32) * batch.loss_mask_T


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 30))
