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
from tests.rollout.stand_ins import Fixed, settings
from tests.rollout.test_manager import Trainer


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
    config = config.model_copy(update={"schedule": schedule})
    trainer = Trainer(folder, config, Ranked())
    await trainer.manager.start()
    engine = trainer.engines.all[0]
    engine.__class__ = Endless
    assert isinstance(engine, Endless)
    engine.asked, engine.given = [], PolicyVersion(resume.lineage, 0)
    await trainer.begin(resume)
    while len(engine.asked) < 8 or trainer.manager.status()["tokens"] < 8:
        await asyncio.sleep(0.01)
    await trainer.manager.stop()
    return engine.asked


async def test_more_urgent_prompts_are_submitted_first_and_resumed_first(tmp_path: Path) -> None:
    assert await submitted(tmp_path, ResumePoint(0)) == [3, 3, 2, 2, 1, 1, 0, 0]
    assert await submitted(tmp_path, ResumePoint(1, 0, 0)) == [3, 3, 2, 2, 1, 1, 0, 0]
