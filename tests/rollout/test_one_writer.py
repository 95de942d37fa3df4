"""Tests that a trajectory has one writer whatever happens to its engines: no response mixes two
streams.

Engines that were taken out of service stay alive and continue to stream. A token of a simulated
engine depends on the token before it and its position, so mixed streams are visible in the tokens.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest

from megatron_async.engines.simulated.engine import SimulatedEngineModel
from megatron_async.rollout.generation import Generation
from megatron_async.store import buffers
from megatron_async.trajectory.types import Trajectory, TrajectoryState
from tests.rollout.short_limits import ModelEngines, config_of, trainer_of
from tests.rollout.stand_ins import trajectories_in
from tests.rollout.test_manager import Trainer


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store write a chunk after four tokens."""
    monkeypatch.setattr(buffers, "CHUNK_TOKENS", 4)


STOP = 2


def mixed(trajectory: Trajectory, model: SimulatedEngineModel) -> int | None:
    """Return the first position whose token does not follow from the token before it; None if all
    do."""
    prompt = trajectory.prompt.token_ids
    ids = np.concatenate([prompt, *(s.token_ids for s in trajectory.segments)]).tolist()
    for position in range(len(prompt), len(ids)):
        if ids[position] not in (STOP, model.next_token(ids[position - 1], position, (STOP,))):
            return position
    return None


async def give_up_some(trainer: Trainer, seed: int) -> None:
    """Mark random engines as stale six times, each at a moment when a response on the engine is
    being finished."""
    chosen = random.Random(seed)
    driver = trainer.manager._driver
    generation: Generation = driver._generation
    for _ in range(6):
        tracked = driver._tracked_engines[chosen.choice(sorted(driver._tracked_engines))]
        async with asyncio.timeout(10):
            while not any(
                r.tracked is tracked and r.complete for r in generation._requests.values()
            ):
                await asyncio.sleep(0)
        driver.engine_stale(tracked.engine_id, "its weights are suspect (a test asks for it)")
        owned = {request.task for request in generation._requests.values()}
        running = {t for t in asyncio.all_tasks() if "Generation._run" in repr(t)}
        assert not [t for t in running - owned if not t.cancelling()], (
            "a stream runs without a request"
        )
        await asyncio.sleep(chosen.random() * 0.05)
        if driver.stale_engines():
            await trainer.publish(0, 0)


@pytest.mark.parametrize("slow_disk", [0.0, 0.02])
@pytest.mark.parametrize("seed", range(3))
async def test_responses_have_one_writer_when_removed_engines_keep_streaming(
    tmp_path: Path, seed: int, slow_disk: float
) -> None:
    model = SimulatedEngineModel(
        mean_length=30, step_seconds=0.002, stream_interval=4, seed=seed, vocab_size=5000
    )
    config = config_of(
        "pipeline",
        engines={"hang_timeout_seconds": 60.0},
        schedule={"concurrency": 12, "group_size": 8, "groups_per_batch": 64},
    )
    trainer = await trainer_of(tmp_path, config, ModelEngines(model)).started()
    store = trainer.manager._attached.store
    sync = store.sync

    async def slow(*, durable: bool = False) -> int:
        await asyncio.sleep(slow_disk)
        return await sync(durable=durable)

    store.sync = slow  # type: ignore[method-assign]
    await give_up_some(trainer, seed)
    driver = trainer.manager._driver
    assert driver.background.failure is None
    assert "superseded_append" not in driver.statistics.warnings, "an old stream reached the store"
    await trainer.manager.stop()
    found = trajectories_in(tmp_path).values()
    assert sum(t.state is not TrajectoryState.PENDING for t in found) > 12
    assert [(t.trajectory_id, mixed(t, model)) for t in found if mixed(t, model)] == []


async def test_store_refuses_tokens_when_an_old_stream_was_not_canceled(tmp_path: Path) -> None:
    """The store is the last protection: here the streams of the removed engine are not canceled."""
    model = SimulatedEngineModel(
        mean_length=200, step_seconds=0.002, stream_interval=4, vocab_size=5000
    )

    trainer = await trainer_of(tmp_path, config_of("pipeline"), ModelEngines(model)).started()
    driver = trainer.manager._driver
    while driver.statistics.counts.tokens < 100:
        await asyncio.sleep(0.005)
    tracked = driver._tracked_engines[trainer.engines.all[0].engine_id]
    for request in driver._generation._on(tracked):
        request.cancel = lambda: None  # type: ignore[method-assign]
    driver.engine_stale(tracked.engine_id, "its weights are suspect (a test asks for it)")
    before = driver.statistics.counts.tokens
    while driver.statistics.counts.tokens < before + 300:
        await asyncio.sleep(0.005)
    assert driver.background.failure is None
    assert "is superseded" in driver.statistics.warnings["superseded_append"]
    await trainer.manager.stop()
    found = trajectories_in(tmp_path).values()
    assert [(t.trajectory_id, mixed(t, model)) for t in found if mixed(t, model)] == []
