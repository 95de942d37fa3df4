"""Tests prompts that engines refuse, that are too long, or on which engine after engine dies.

Such prompts are dropped; a healthy engine and the run continue.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from megatron_async.engines.interface import (
    ForwardingClient,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
)
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.manager import ResumePoint
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.trajectory.types import DropReason, Prompt, TrajectoryState
from tests.rollout.short_limits import ModelEngines, config_of, in_service, trainer_of
from tests.rollout.stand_ins import Fixed, trajectories_in
from tests.rollout.test_manager import Trainer


class Refusing(SimulatedEngine):
    """Simulated engine that refuses the fourth prompt of the task, or the prompts in `bad`, as
    invalid."""

    bad: ClassVar[set[int]] = {3}

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        if int(request.input_ids[1]) in self.bad:
            await asyncio.sleep(0.002)
            raise RequestRefused(
                f"{self.engine_id}: the engine rejected it with status 400: too long"
            )
        async for chunk in super().generate(request):
            yield chunk


def dropped(folder: Path) -> dict[int, set[int]]:
    """Return the trajectories that were dropped as refused, by prompt number."""
    found: dict[int, set[int]] = {}
    for number, trajectory in trajectories_in(folder).items():
        if trajectory.state is TrajectoryState.DROPPED:
            assert trajectory.drop_reason is DropReason.REFUSED
            found.setdefault(int(trajectory.prompt.token_ids[1]), set()).add(number)
    return found


async def six_steps(folder: Path, lineage: int, refused: int) -> dict[str, str]:
    """Run six steps on two engines that refuse the fourth prompt; check that both stay and return
    the warnings."""
    model = SimulatedEngineModel(mean_length=30, step_seconds=0.002, stream_interval=16)
    config = config_of("copris", count=2, schedule={"concurrency": 24, "group_size": 4})
    trainer = trainer_of(folder, config, ModelEngines(model, Refusing))
    await trainer.manager.start()
    await trainer.begin(ResumePoint(lineage, 0, parent=lineage - 1 if lineage else None))
    for step in range(6):
        assert (await trainer.batch()).step == step
        await trainer.publish(lineage, step + 1)
    up, warnings = in_service(trainer)
    assert up == 2 and len(trainer.engines.all) == 2
    assert trainer.manager._driver.statistics.counts.dropped["refused"] == refused
    await trainer.manager.stop()
    return warnings


async def test_run_drops_only_the_group_of_a_prompt_that_engines_refuse(tmp_path: Path) -> None:
    """The group stays dropped when the run is resumed."""
    warnings = await six_steps(tmp_path, lineage=0, refused=4)
    assert list(warnings) == ["prompt_refused"]
    assert "dropped group 3 of fixed, whose prompt has 2 tokens" in warnings["prompt_refused"]
    assert "--show 12" in warnings["prompt_refused"]
    assert await six_steps(tmp_path, lineage=1, refused=0) == {}
    assert dropped(tmp_path) == {3: {12, 13, 14, 15}}


async def test_run_drops_only_the_group_of_a_resumed_prompt_that_is_refused(
    tmp_path: Path,
) -> None:
    """Engines of the previous session accepted the prompt: two members of its group have tokens,
    two never ran."""
    group = range(12, 16)  # Trajectories of the fourth prompt.
    model = SimulatedEngineModel(mean_length=10**9, step_seconds=0.002, stream_interval=4)
    config = config_of("copris", schedule={"concurrency": 14, "group_size": 4})
    trainer = await trainer_of(tmp_path, config, ModelEngines(model)).started()
    store = trainer.manager._driver._store
    async with asyncio.timeout(10):
        while store._state.counters.next_trajectory <= group[-1] or not all(
            store.load_trajectory(i).response_length for i in group[:2]
        ):
            await asyncio.sleep(0.005)
    await trainer.manager.stop()
    states = [trajectories_in(tmp_path)[i].state for i in group]
    assert states == 2 * [TrajectoryState.RUNNING] + 2 * [TrajectoryState.PENDING]
    warnings = await six_steps(tmp_path, lineage=1, refused=4)
    assert list(warnings) == ["prompt_refused"]
    assert "dropped group 3 of fixed" in warnings["prompt_refused"]
    assert dropped(tmp_path) == {3: set(group)}


async def test_run_ends_with_an_error_when_every_prompt_is_refused(tmp_path: Path) -> None:
    class RefusingAll(Refusing):
        bad: ClassVar[set[int]] = set(range(1000))

    config = config_of("copris", count=1, trainer={"wait_for_batch_seconds": 20.0})
    model = SimulatedEngineModel(mean_length=30, step_seconds=0.002)
    trainer = await trainer_of(tmp_path, config, ModelEngines(model, RefusingAll)).started()
    with pytest.raises(ComponentFailure, match="64 prompts in a row were refused and none"):
        await trainer.batch()
    assert trainer.manager.status()["engines_up"] == 1
    await trainer.manager.stop()


@pytest.mark.parametrize("limit", [34, None])
async def test_run_continues_when_one_engine_reports_a_lower_length_limit(
    tmp_path: Path, limit: int | None
) -> None:
    """The engine's report may be wrong, and if it is right, the engine itself refuses longer
    requests."""

    class Damaged(ForwardingClient):
        max_sequence_tokens = 1

    class OneDamaged(ModelEngines):
        async def launch(self, index: int) -> Any:
            engine = await super().launch(index)
            return Damaged(engine) if index else engine

    config = config_of("copris", count=2, sampling={"max_new_tokens": 32})
    model = SimulatedEngineModel(mean_length=8, step_seconds=0.002, max_sequence_tokens=limit)
    trainer = await trainer_of(tmp_path, config, OneDamaged(model)).started()
    for step in range(3):
        assert (await trainer.batch()).step == step
        await trainer.publish(0, step + 1)
    assert in_service(trainer) == (2, {})
    await trainer.manager.stop()


class Dying(SimulatedEngine):
    """Simulated engine whose process dies 0.1 s after it gets a prompt in `fatal`; it serves other
    requests meanwhile."""

    fatal: ClassVar[range] = range(3, 4)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        if int(request.input_ids[1]) in self.fatal:
            await asyncio.sleep(0.1)
            self.crash("out of memory")
        async for chunk in super().generate(request):
            yield chunk


def trainer_of_dying_engines(folder: Path, kind: type[Dying], group_size: int = 4) -> Trainer:
    model = SimulatedEngineModel(mean_length=100, step_seconds=0.002, stream_interval=4)
    batch = {"group_size": group_size, "groups_per_batch": 12 // group_size}
    schedule = {"concurrency": 24, **batch}  # An engine dies before a batch is complete.
    changes = {"engines": {"max_restarts": 8}, "schedule": schedule}
    return trainer_of(folder, config_of("copris", count=2, **changes), ModelEngines(model, kind))


async def test_prompt_is_dropped_when_engine_after_engine_dies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.rollout.monitor._ASK_AGAIN_SECONDS", 0.02)

    trainer = await trainer_of_dying_engines(tmp_path, Dying).started()
    for step in range(12):
        while await trainer.manager.next_batch(0) is TrainerTask.SEND_WEIGHTS:
            await trainer.publish(0, step)
        await trainer.publish(0, step + 1)
    up, warnings = in_service(trainer)
    assert up == 2
    assert "dropped group 3 of fixed" in warnings["prompt_refused"]
    assert "6 engines in a row failed before its first token" in warnings["prompt_refused"]
    await trainer.manager.stop()
    assert dropped(tmp_path) == {3: {12, 13, 14, 15}}


async def test_no_prompt_is_dropped_when_engines_die_on_every_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.rollout.monitor._ASK_AGAIN_SECONDS", 0.02)

    class DyingLater(Dying):
        fatal: ClassVar[range] = range(0)

    trainer = await trainer_of_dying_engines(tmp_path, DyingLater).started()
    await trainer.batch()
    DyingLater.fatal = range(1000)
    await trainer.publish(0, 1)
    with pytest.raises(ComponentFailure, match="no inference engine is left"):
        for step in itertools.count(1):
            while await trainer.manager.next_batch(0) is TrainerTask.SEND_WEIGHTS:
                await trainer.publish(0, step)
            await trainer.publish(0, step + 1)
    assert len(trainer.engines.all) == 2 * 9
    await trainer.manager.stop()
    assert dropped(tmp_path) == {}


class SomeTooLong(Fixed):
    """Task with epochs of `size` prompts, of which the first `too_long` do not fit into 34
    tokens."""

    def __init__(self, size: int | None, too_long: int) -> None:
        self._size, self._too_long = size, too_long
        self.read = 0

    def counts(self, heldout: int) -> tuple[int | None, int]:
        return self._size, heldout

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        if position >= self.read:  # The condition is false for the manager's probe prompts.
            self.read = position + count
        positions = [(position + i) % (self._size or 1000) for i in range(count)]
        lengths = [8 if number < self._too_long else 1 for number in positions]
        return [
            Prompt(np.array([5, position + i, *[7] * length], np.int32), "long")
            for i, length in enumerate(lengths)
        ]


def trainer_with(folder: Path, task: SomeTooLong) -> Trainer:
    changes = {"sampling": {"max_new_tokens": 28}, "trainer": {"wait_for_batch_seconds": 20.0}}
    model = SimulatedEngineModel(mean_length=8, step_seconds=0.002, max_sequence_tokens=34)
    return trainer_of(folder, config_of("copris", count=1, **changes), ModelEngines(model), task)


async def test_too_long_prompts_are_skipped_until_one_fits(tmp_path: Path) -> None:
    """Any number may be skipped: in a file sorted by length all of them come in a row."""
    trainer = await trainer_with(tmp_path, SomeTooLong(size=150, too_long=140)).started()
    for step in range(12):  # The steps reach the second epoch.
        batch = await trainer.batch()
        assert (batch.prompt_lengths_S == 3).all()
        await trainer.publish(0, step + 1)
    up, warnings = in_service(trainer)
    assert up == 1 and "exceeds the 34 tokens" in warnings["prompt_refused"]
    counted = trainer.manager._driver.statistics.counts.dropped["refused"]
    await trainer.manager.stop()
    assert counted == sum(map(len, dropped(tmp_path).values())) >= 2 * 2 * 140


@pytest.mark.parametrize(("size", "taken"), [(50, 100), (20, 64), (None, 64)])
async def test_run_ends_when_no_prompt_of_the_data_fits(
    tmp_path: Path, size: int | None, taken: int
) -> None:
    """The run ends once a whole epoch must be among the prompts; for endless data after 64
    prompts."""
    task = SomeTooLong(size, too_long=1000)
    trainer = await trainer_with(tmp_path, task).started()
    sentence = (
        f"^{taken} prompts in a row were refused .* with sampling.max_new_tokens 28 it exceeds"
    )
    with pytest.raises(ComponentFailure, match=sentence):
        await trainer.batch()
    assert task.read < taken + 16
    assert trainer.manager.status()["engines_up"] == 1
    await trainer.manager.stop()
