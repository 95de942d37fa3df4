"""Engines that answer, and still do not work, are given up; the run goes on with the others.

A whole manager over simulated engines, with limits of about a second in place of minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.engines.interface import EngineError, GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from tests.rollout.short_limits import HUNG, ModelEngines, config_of, in_service, trainer_of

NO_TOKENS = (np.zeros(0, np.int32), np.zeros(0, np.float32))
MODEL = SimulatedEngineModel(mean_length=12, step_seconds=0.02, stream_interval=4)


class Odd(SimulatedEngine):
    """Sends no load report that can be read, or aborts what it is asked for, or neither."""

    unreadable = silent = aborts = False

    async def status(self) -> Any:
        if self.unreadable:
            raise EngineError(f"{self.engine_id}: its load report cannot be: KeyError: 'loads'")
        return await super().status()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.aborts:
            await asyncio.sleep(0.005)
            yield TokenChunk(*NO_TOKENS, await self.version(), "abort")
            return
        async for chunk in super().generate(request):
            while self.silent:
                await asyncio.sleep(0.01)
            yield chunk


@pytest.mark.parametrize(
    ("oddity", "why"),
    [
        ({"unreadable": True}, "sent no load report that can be read for"),
        ({"unreadable": True, "silent": True}, "engine0.0 "),
        ({"aborts": True}, "made no token for"),
    ],
)
async def test_an_engine_that_answers_and_does_not_work_is_given_up(
    tmp_path: Path, oddity: dict[str, bool], why: str
) -> None:
    config = config_of("copris", schedule={"groups_per_batch": 8})  # a step takes seconds
    trainer = await trainer_of(tmp_path, config, ModelEngines(MODEL, Odd)).started()
    await trainer.batch()
    for name, value in oddity.items():
        setattr(trainer.engines.all[0], name, value)
    step = 0
    while in_service(trainer)[0] == 2:
        step += 1
        await trainer.publish(0, step)
        await trainer.batch()
    assert why in in_service(trainer)[1]["engine_failed"]
    await trainer.publish(0, step + 1)
    assert (await trainer.batch()).step == step + 1
    await trainer.manager.stop()


async def test_an_engine_is_given_up_for_no_load_report_alone_only_after_that_long(
    tmp_path: Path,
) -> None:
    """A few that cannot be read, and then one that can."""
    config = config_of("copris", engines={"no_progress_seconds": 4 * HUNG})
    trainer = await trainer_of(tmp_path, config, ModelEngines(MODEL, Odd)).started()
    await trainer.batch()
    odd = trainer.engines.all[0]
    for _ in range(3):
        odd.unreadable = True
        await asyncio.sleep(1.5 * HUNG)
        odd.unreadable = False
        await asyncio.sleep(0.5 * HUNG)
    up, warnings = in_service(trainer)
    assert (up, set(warnings)) == (2, {"engine_suspect"})
    await trainer.manager.stop()
