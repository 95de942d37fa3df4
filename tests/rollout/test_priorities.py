"""Priorities of prompts in a live run: what waits is submitted by them, also after a resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from megatron_async.engines.interface import GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.rollout.manager import ResumePoint
from megatron_async.trajectory.types import PolicyVersion, Prompt
from tests.rollout.stand_ins import Engines, Fixed, manager_of, run, settings


class Ranked(Fixed):
    """Prompts 0 to 3, each more urgent than the one before it."""

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        numbers = range(position, min(position + count, 4))
        return [Prompt(np.array([5, i], np.int32), "fixed", priority=i) for i in numbers]


class Endless(SimulatedEngine):
    """Gives a request its first token and no end; records the prompts in order."""

    asked: list[int]
    given: PolicyVersion

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.asked.append(int(request.input_ids[1]))
        first = np.array([7], np.int32), np.array([-1.0], np.float32)
        yield TokenChunk(*first, self.given)
        await asyncio.Event().wait()


async def submitted(folder: Path, resume: ResumePoint) -> list[int]:
    """Prompts of the first eight requests of one life of a run, each of which got tokens."""
    config = settings("copris")
    schedule = config.schedule.model_copy(update={"concurrency": 8, "groups_per_batch": 4})
    engines = Engines()
    config = config.model_copy(update={"schedule": schedule})
    manager = manager_of(folder, config, engines, Ranked())
    await manager.start()
    engine = engines.all[0]
    engine.__class__ = Endless
    assert isinstance(engine, Endless)
    engine.asked, engine.given = [], PolicyVersion(resume.lineage, 0)
    await manager.attach(resume)
    await manager.begin_update(resume.lineage, 0)
    engine.set_weights(engine.given)
    await manager.end_update(resume.lineage, 0, [engine.engine_id], False)
    await manager.verify_update(resume.lineage, 0, None, False)
    while len(engine.asked) < 8 or manager.status()["tokens"] < 8:
        await asyncio.sleep(0.01)
    await manager.stop()
    return engine.asked


def test_more_urgent_prompts_are_submitted_first_and_resumed_first(tmp_path: Path) -> None:
    async def body() -> None:
        assert await submitted(tmp_path, ResumePoint(0)) == [3, 3, 2, 2, 1, 1, 0, 0]
        assert await submitted(tmp_path, ResumePoint(1, 0, 0)) == [3, 3, 2, 2, 1, 1, 0, 0]

    run(body())
