"""An engine that fails the check of its weights gets them once more, and is replaced after that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Self
from unittest import mock

import numpy as np
import pytest

from megatron_async.config import RunConfig
from megatron_async.engines.interface import GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.manager import ResumePoint, UpdateReport
from megatron_async.rollout.probe import ProbeSample
from megatron_async.rollout.weight_checks import WeightChecks
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion
from tests.rollout.stand_ins import (
    MODEL,
    Engines,
    manager_of,
    settings,
    trainer_logprobs,
    trajectories_in,
)


class WrongEngine(SimulatedEngine):
    """Lies so many times in one of the answers that are checked."""

    def __init__(self, engine_id: str, lie: str, times: int) -> None:
        super().__init__(engine_id, MODEL)
        self._lie = lie
        self._times = times
        self.first_wrong = 0
        self.lied: list[TokenChunk] = []

    def _lies(self, about: str) -> bool:
        return about == self._lie and self._times > 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Wrong weights show in all that it generates with them, until it is sent them again."""
        async for chunk in super().generate(request):
            if self._lies("probe") and chunk.version.number >= self.first_wrong:
                chunk = replace(chunk, logprobs=chunk.logprobs + np.float32(1))
                self.lied.append(chunk)
            yield chunk

    async def flush_cache(self) -> None:
        await super().flush_cache()
        if self.lied:  # it was sent them again
            self._times -= 1
            self.lied = []

    async def checksum(self) -> str:
        if self._lies("probe") and (await super().version()).number >= self.first_wrong:
            return "wrong weights"
        lies = self._lies("checksum")
        self._times -= lies
        return "another" if lies else await super().checksum()

    async def version(self) -> PolicyVersion:
        held, lies = await super().version(), self._lies("version")
        self._times -= lies
        return PolicyVersion(held.lineage, held.number + 7) if lies else held


class WrongEngines(Engines):
    """Engine 0 lies `times[0]` times, the one that replaces it `times[1]`, ..."""

    def __init__(self, lie: str, times: list[int]) -> None:
        super().__init__()
        self._lie = lie
        self._left = list(times)
        self.now: dict[int, SimulatedEngine] = {}

    async def launch(self, index: int) -> SimulatedEngine:
        times = self._left.pop(0) if index == 0 and self._left else 0
        engine = WrongEngine(f"engine{index}.{len(self.all)}", self._lie, times)
        self.all.append(engine)
        self.now[index] = engine
        return engine

    async def alive(self, index: int) -> bool:
        return not self.now[index]._crash_reason


class Run:
    def __init__(self, folder: Path, config: RunConfig, engines: WrongEngines) -> None:
        self.engines = engines
        self.manager = manager_of(folder, config, engines)

    async def started(self) -> Self:
        """Start the manager and attach to it."""
        await self.manager.start()
        await self.manager.attach(ResumePoint(0))
        return self

    async def publish(self, number: int) -> UpdateReport:
        samples = await self.send(number)
        logprobs_T = None if samples is None else trainer_logprobs(samples)
        return await self.manager.verify_update(0, number, logprobs_T, True)

    async def send(self, number: int) -> TokenBatch | None:
        addresses = await self.manager.begin_update(0, number)
        for engine in self.engines.now.values():
            engine.set_weights(PolicyVersion(0, number), f"weights {number}")
        ids = [address.engine_id for address in addresses]
        return await self.manager.end_update(0, number, ids, True)

    async def train(self, steps: int) -> int:
        """As the trainer's loop does; the number of publications."""
        await self.manager.start()
        await self.manager.attach(ResumePoint(0))
        await self.publish(0)
        done, published = 0, 1
        while done < steps:
            if await self.manager.next_batch(0) is not None:
                done += 1
            await self.publish(done)
            published += 1
        return published

    @property
    def up(self) -> list[str]:
        stale = self.manager._driver.stale_engines()
        return [e.engine_id for e in self.manager._driver.engines() if e not in stale]


def restarting(engines: int) -> RunConfig:
    config = settings("async", engines)
    return config.model_copy(
        update={"engines": config.engines.model_copy(update={"max_restarts": 1})}
    )


@pytest.mark.parametrize("lie", ["probe", "version"])
async def test_after_one_mismatch_the_update_is_repeated_and_the_engine_serves(
    tmp_path: Path, lie: str
) -> None:
    it = Run(tmp_path, restarting(1), WrongEngines(lie, [1]))
    assert await it.train(3) == 5, "one of them twice"
    assert it.up == ["engine0.0"]
    await it.manager.stop()


@pytest.mark.parametrize("lie", ["probe", "version"])
async def test_after_the_second_the_engine_is_replaced(tmp_path: Path, lie: str) -> None:
    it = Run(tmp_path, restarting(1), WrongEngines(lie, [2]))
    await it.train(2)
    assert it.up == ["engine0.1"]
    await it.manager.stop()


async def test_one_of_three_that_differs_is_the_suspect(tmp_path: Path) -> None:
    it = Run(tmp_path, restarting(3), WrongEngines("checksum", [2]))
    await it.train(3)
    assert len(it.up) == 3 and "engine0.0" not in it.up
    assert {"engine1.1", "engine2.2"} <= set(it.up)
    await it.manager.stop()


async def test_of_two_that_differ_the_one_that_samples_from_other_weights_is_wrong(
    tmp_path: Path,
) -> None:
    """Its checksum has as many votes as the other's: the trainer's log-probs decide."""
    it = await Run(tmp_path, restarting(2), WrongEngines("probe", [2])).started()
    report = await it.publish(0)
    assert not report.passed and it.up == ["engine1.1"]
    assert it.manager._suspects == {"engine0.0"}
    await it.publish(0)  # wrong once more: it is replaced, and the healthy one stays
    while len(it.engines.all) == 2:
        await asyncio.sleep(0.01)
    while len(it.up) < 2:
        await it.publish(0)
    assert set(it.up) == {"engine0.2", "engine1.1"}
    await it.manager.stop()


async def test_two_that_differ_and_both_sample_as_the_trainer_does_are_sent_the_weights_again(
    tmp_path: Path,
) -> None:
    """What one of them holds is wrong where a few tokens do not show it."""
    it = await Run(tmp_path, restarting(2), WrongEngines("checksum", [1])).started()
    await it.publish(0)
    assert it.up == []
    await it.publish(0)
    assert len(it.up) == 2
    await it.manager.stop()


async def test_the_run_ends_with_the_reason_when_no_engine_ever_passes(tmp_path: Path) -> None:
    it = Run(tmp_path, restarting(1), WrongEngines("probe", [99, 99]))
    with pytest.raises(
        ComponentFailure, match=r"no inference engine is left: .*log-probs of its own"
    ):
        await it.train(2)
    await it.manager.stop()


async def test_a_mismatch_after_the_last_step_is_an_error(tmp_path: Path) -> None:
    config = restarting(1).model_copy(update={"steps": 0})
    it = await Run(tmp_path, config, WrongEngines("probe", [1])).started()
    with pytest.raises(ComponentFailure, match="no engine holds the last version"):
        await it.publish(0)
    await it.manager.stop()


def stored(folder: Path) -> list[tuple[int, float]]:
    """(position, log-prob) error of every token in the store: 0 where the engine did not lie."""
    tokens = []
    for trajectory in trajectories_in(folder).values():
        at = len(trajectory.prompt.token_ids)
        for segment in trajectory.segments:
            for token, logprob in zip(segment.token_ids, segment.logprobs, strict=True):
                tokens.append((at, abs(float(logprob) - MODEL.logprob(int(token), at))))
                at += 1
    return tokens


@pytest.mark.parametrize("preset", ["pipeline", "copris", "sync"])
async def test_tokens_wait_until_their_engine_is_verified_and_then_all_are_kept(
    tmp_path: Path, preset: str
) -> None:
    it = await Run(tmp_path, settings(preset), WrongEngines("nothing", [])).started()
    samples = await it.send(0)
    engine = it.engines.now[0]
    while engine.tokens_generated < 48 + 4:  # after its samples it does not idle
        await asyncio.sleep(0.001)
    assert it.manager.status()["tokens"] == 0
    assert samples is not None
    await it.manager.verify_update(0, 0, trainer_logprobs(samples), True)
    batch = await it.manager.next_batch(0)
    assert batch is not None
    await it.manager.stop()
    tokens = stored(tmp_path)
    assert len(tokens) >= 12 and max(error for _, error in tokens) < 1e-6


@pytest.mark.parametrize("preset", ["pipeline", "async"])
async def test_no_token_of_an_engine_that_fails_its_check_reaches_the_store(
    tmp_path: Path, preset: str
) -> None:
    """In the middle of a run: the version before was right, and what it made is kept."""
    config = settings(preset)
    never_idle = {"max_waiting_batches": 100, "max_async_level": None}
    config = config.model_copy(
        update={
            "engines": restarting(1).engines,
            "schedule": config.schedule.model_copy(update=never_idle),
        }
    )
    it = await Run(tmp_path, config, WrongEngines("probe", [0])).started()
    await it.publish(0)
    assert await it.manager.next_batch(0) is not None
    engine = it.engines.now[0]
    assert isinstance(engine, WrongEngine)
    engine._times, engine.first_wrong = 2, 1
    for _ in range(2):  # wrong, sent again and wrong again, replaced
        samples = await it.send(1)
        assert samples is not None
        while len(engine.lied) <= 12:  # chunks of the samples
            await asyncio.sleep(0.001)
        report = await it.manager.verify_update(0, 1, trainer_logprobs(samples), True)
        assert report.metrics["weights/probe_mean_error"] == pytest.approx(1.0, abs=1e-6)
        assert not report.passed
    while it.engines.now[0] is engine:
        await asyncio.sleep(0.01)
    for step in (1, 2):
        while (batch := await it.manager.next_batch(0)) is None:
            await it.publish(step)
        assert batch.step == step
        await it.publish(step + 1)
    assert it.up == ["engine0.1"]
    await it.manager.stop()
    tokens = stored(tmp_path)
    assert len(tokens) > 20 and max(error for _, error in tokens) < 1e-6


async def test_aborts_wait_for_a_verification_that_takes_its_time(tmp_path: Path) -> None:
    """A stream whose tokens wait does not end, and that is not the engine's failure."""
    it = await Run(tmp_path, settings("pipeline"), WrongEngines("nothing", [])).started()
    samples = await it.send(0)
    driver = it.manager._driver
    while not len(driver._generation):
        await asyncio.sleep(0.001)
    with mock.patch("megatron_async.rollout.generation._ABORT_WAIT_SECONDS", 0.001):
        aborting = asyncio.create_task(
            driver._generation.abort(driver._generation.mark_for_abort())
        )
        await asyncio.sleep(0.1)  # many times over
        assert it.up == ["engine0.0"] and not aborting.done()
        assert samples is not None
        await it.manager.verify_update(0, 0, trainer_logprobs(samples), True)
        await aborting
    assert it.up == ["engine0.0"]
    await it.manager.stop()


@pytest.mark.parametrize("preset", ["pipeline", "async", "copris"])
async def test_what_runs_at_the_last_update_is_verified_and_then_ended(
    tmp_path: Path, preset: str
) -> None:
    it = Run(
        tmp_path,
        settings(preset).model_copy(update={"steps": 2}),
        WrongEngines("nothing", []),
    )
    assert await it.train(2) == 3
    assert it.manager.status()["running"] == 0
    await it.manager.stop()
    assert max(error for _, error in stored(tmp_path)) < 1e-6


class Holding:
    """An engine that reports a version, whatever it holds."""

    dtype = "float32"

    def __init__(self, engine_id: str, weights: str) -> None:
        self.engine_id, self._weights = engine_id, weights

    async def version(self) -> PolicyVersion:
        return PolicyVersion(0, 1)

    async def checksum(self) -> str:
        return self._weights


async def test_what_engines_of_wrong_weights_agree_on_does_not_bind_those_that_come_after() -> None:
    """Else every engine that is sent the right weights is replaced, for ever."""
    checks, version = WeightChecks(settings("async"), list), PolicyVersion(0, 1)

    async def passed(*engines: Holding, error: float) -> list[str]:
        held = (await checks.held(list(engines), version)).good  # type: ignore[arg-type]
        samples = [
            ProbeSample(e.engine_id, np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, -1.0))
            for e in held
        ]
        trainer_T = np.tile(np.array([0.0, error - 1.0], np.float32), len(samples))
        outcome, _ = checks.ratios(held, samples, trainer_T, version, float32=True)
        return [engine.engine_id for engine in outcome.good]

    assert await passed(Holding("a", "old"), Holding("b", "old"), error=1.0) == []
    assert await passed(Holding("a", "new"), Holding("b", "new"), error=0.0) == ["a", "b"]
    assert await passed(Holding("c", "old"), error=0.0) == [], "two that are right hold new"
