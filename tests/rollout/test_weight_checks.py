"""Tests an engine that fails the check of its weights: it gets them once more, and is replaced if
it fails again."""

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
from megatron_async.rollout.trainer_task import TrainerTask
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
    """Simulated engine that gives a wrong checksum, version or log-prob (`lie`) in `times`
    updates."""

    def __init__(self, engine_id: str, lie: str, times: int) -> None:
        super().__init__(engine_id, MODEL)
        self._lie = lie
        self._times = times
        self.first_wrong = 0
        self.lied: list[TokenChunk] = []

    def _lies(self, about: str) -> bool:
        return about == self._lie and self._times > 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Generate with wrong log-probs while the engine has wrong weights, that is until it is
        sent them again."""
        async for chunk in super().generate(request):
            if self._lies("probe") and chunk.version.number >= self.first_wrong:
                chunk = replace(chunk, logprobs=chunk.logprobs + np.float32(1))
                self.lied.append(chunk)
            yield chunk

    async def flush_cache(self) -> None:
        await super().flush_cache()
        if self.lied:  # The flush shows that the weights were sent again.
            self._times -= 1
            self.lied = []

    async def checksum(self) -> str:
        if self._lies("probe") and (await super().version()).number >= self.first_wrong:
            return "wrong weights"
        lies = self._lies("checksum")
        self._times -= lies
        return "another" if lies else await super().checksum()

    async def version(self) -> PolicyVersion:
        version, lies = await super().version(), self._lies("version")
        self._times -= lies
        return PolicyVersion(version.lineage, version.number + 7) if lies else version


class WrongEngines(Engines):
    """Launcher whose engine 0 lies `times[0]` times, its replacement `times[1]` times, and so
    on."""

    def __init__(self, lie: str, times: list[int]) -> None:
        super().__init__()
        self._lie = lie
        self._remaining = list(times)
        self.now: dict[int, SimulatedEngine] = {}

    async def launch(self, index: int) -> SimulatedEngine:
        times = self._remaining.pop(0) if index == 0 and self._remaining else 0
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
        await self.manager.end_update(0, number, ids, True)
        return await self.manager.verification_samples(0, number)

    async def train(self, steps: int) -> int:
        """Train `steps` steps as the trainer's loop does; return the number of published
        updates."""
        await self.manager.start()
        await self.manager.attach(ResumePoint(0))
        await self.publish(0)
        done, published = 0, 1
        while done < steps:
            if isinstance(await self.manager.next_batch(0), TokenBatch):
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


def never_idle(preset: str) -> RunConfig:
    """Return settings with which engines generate although the trainer takes no batch."""
    config = settings(preset)
    changes = {"max_waiting_batches": 100, "max_async_level": None}
    return config.model_copy(update={"schedule": config.schedule.model_copy(update=changes)})


@pytest.mark.parametrize("lie", ["probe", "version"])
async def test_engine_serves_after_a_repeated_update_when_it_fails_one_check(
    tmp_path: Path, lie: str
) -> None:
    it = Run(tmp_path, restarting(1), WrongEngines(lie, [1]))
    assert await it.train(3) == 5, "one update must be repeated"
    assert it.up == ["engine0.0"]
    await it.manager.stop()


@pytest.mark.parametrize("lie", ["probe", "version"])
async def test_engine_is_replaced_when_it_fails_a_second_check(tmp_path: Path, lie: str) -> None:
    it = Run(tmp_path, restarting(1), WrongEngines(lie, [2]))
    await it.train(2)
    assert it.up == ["engine0.1"]
    await it.manager.stop()


async def test_engine_is_replaced_when_its_checksum_differs_from_two_others(tmp_path: Path) -> None:
    it = Run(tmp_path, restarting(3), WrongEngines("checksum", [2]))
    await it.train(3)
    assert len(it.up) == 3 and "engine0.0" not in it.up
    assert {"engine1.1", "engine2.2"} <= set(it.up)
    await it.manager.stop()


async def test_logprobs_decide_when_the_checksums_of_two_engines_differ(
    tmp_path: Path,
) -> None:
    """The two checksums are equally common, so the trainer's log-probs decide."""
    it = await Run(tmp_path, restarting(2), WrongEngines("probe", [2])).started()
    report = await it.publish(0)
    assert not report.passed and it.up == ["engine1.1"]
    assert it.manager._suspects == {"engine0.0"}
    await it.publish(0)  # This is the second failure, so engine 0 is replaced.
    while len(it.engines.all) == 2:
        await asyncio.sleep(0.01)
    while len(it.up) < 2:
        await it.publish(0)
    assert set(it.up) == {"engine0.2", "engine1.1"}
    await it.manager.stop()


async def test_both_engines_are_updated_again_when_logprobs_do_not_decide(
    tmp_path: Path,
) -> None:
    """One engine has wrong weights that a few tokens do not show."""
    it = await Run(tmp_path, restarting(2), WrongEngines("checksum", [1])).started()
    await it.publish(0)
    assert it.up == []
    await it.publish(0)
    assert len(it.up) == 2
    await it.manager.stop()


async def test_run_ends_with_the_reason_when_no_engine_ever_passes_a_check(tmp_path: Path) -> None:
    it = Run(tmp_path, restarting(1), WrongEngines("probe", [99, 99]))
    with pytest.raises(
        ComponentFailure, match=r"no inference engine is left: .*log-probs of its own"
    ):
        await it.train(2)
    await it.manager.stop()


async def test_verification_fails_when_no_engine_has_the_last_version(tmp_path: Path) -> None:
    config = restarting(1).model_copy(update={"steps": 0})
    it = await Run(tmp_path, config, WrongEngines("probe", [1])).started()
    with pytest.raises(ComponentFailure, match="no engine has loaded the last version"):
        await it.publish(0)
    await it.manager.stop()


def stored(folder: Path) -> list[tuple[int, float]]:
    """Return the position and the log-prob error of every stored token; the error is 0 if the
    engine did not lie."""
    tokens = []
    for trajectory in trajectories_in(folder).values():
        at = len(trajectory.prompt.token_ids)
        for segment in trajectory.segments:
            for token, logprob in zip(segment.token_ids, segment.logprobs, strict=True):
                tokens.append((at, abs(float(logprob) - MODEL.logprob(int(token), at))))
                at += 1
    return tokens


@pytest.mark.parametrize("preset", ["pipeline", "copris", "sync"])
async def test_tokens_are_stored_when_their_engine_is_verified(tmp_path: Path, preset: str) -> None:
    it = await Run(tmp_path, settings(preset), WrongEngines("nothing", [])).started()
    samples = await it.send(0)
    engine = it.engines.now[0]
    while engine.tokens_generated < 48 + 4:  # The engine generates after its samples.
        await asyncio.sleep(0.001)
    assert it.manager.status()["tokens"] == 0
    assert samples is not None
    await it.manager.verify_update(0, 0, trainer_logprobs(samples), True)
    assert isinstance(await it.manager.next_batch(0), TokenBatch)
    await it.manager.stop()
    tokens = stored(tmp_path)
    assert len(tokens) >= 12 and max(error for _, error in tokens) < 1e-6


@pytest.mark.parametrize("preset", ["pipeline", "async"])
async def test_no_token_is_stored_when_its_engine_fails_its_check(
    tmp_path: Path, preset: str
) -> None:
    """In the middle of a run, the version before was right, and its tokens are kept."""
    config = never_idle(preset).model_copy(update={"engines": restarting(1).engines})
    it = await Run(tmp_path, config, WrongEngines("probe", [0])).started()
    await it.publish(0)
    assert isinstance(await it.manager.next_batch(0), TokenBatch)
    engine = it.engines.now[0]
    assert isinstance(engine, WrongEngine)
    engine._times, engine.first_wrong = 2, 1
    for _ in range(2):  # The engine is wrong twice and is then replaced.
        samples = await it.send(1)
        assert samples is not None
        while len(engine.lied) <= 12:  # The samples have fewer chunks.
            await asyncio.sleep(0.001)
        report = await it.manager.verify_update(0, 1, trainer_logprobs(samples), True)
        assert report.metrics["weights/probe_mean_error"] == pytest.approx(1.0, abs=1e-6)
        assert not report.passed
    while it.engines.now[0] is engine:
        await asyncio.sleep(0.01)
    for step in (1, 2):
        while (batch := await it.manager.next_batch(0)) is TrainerTask.SEND_WEIGHTS:
            await it.publish(step)
        assert isinstance(batch, TokenBatch) and batch.step == step
        await it.publish(step + 1)
    assert it.up == ["engine0.1"]
    await it.manager.stop()
    tokens = stored(tmp_path)
    assert len(tokens) > 20 and max(error for _, error in tokens) < 1e-6


class SlowSamples(WrongEngine):
    """Engine whose checksum, which precedes its samples, takes until `proceed` is set."""

    proceed: asyncio.Event

    async def checksum(self) -> str:
        await self.proceed.wait()
        return await super().checksum()


async def next_version(it: Run) -> asyncio.Event:
    """Send version 1 to the engine without waiting for its samples; return the event that lets the
    engine continue."""
    addresses = await it.manager.begin_update(0, 1)
    engine = it.engines.now[0]
    engine.set_weights(PolicyVersion(0, 1), "weights 1")
    engine.__class__ = SlowSamples
    assert isinstance(engine, SlowSamples)
    engine.proceed = asyncio.Event()
    assert not await it.manager.end_update(0, 1, [a.engine_id for a in addresses], True)
    return engine.proceed


@pytest.mark.parametrize("preset", ["pipeline", "async"])
async def test_batch_is_returned_when_it_is_ready_before_the_samples(
    tmp_path: Path, preset: str
) -> None:
    it = await Run(tmp_path, never_idle(preset), WrongEngines("nothing", [])).started()
    await it.publish(0)
    assert isinstance(await it.manager.next_batch(0), TokenBatch)
    while not it.manager._driver._batches.qsize():
        await asyncio.sleep(0.001)
    proceed = await next_version(it)
    assert isinstance(await it.manager.next_batch(0), TokenBatch)
    # Responses that were complete before the update are still scored and trained on.
    while True:
        waiting = asyncio.create_task(it.manager.next_batch(0))
        await asyncio.wait([waiting], timeout=0.2)
        if not waiting.done():
            break
        batch = waiting.result()
        assert isinstance(batch, TokenBatch), "the updated engine must not get the weights again"
    proceed.set()
    assert await waiting is TrainerTask.VERIFY
    assert await it.manager.next_batch(0) is TrainerTask.VERIFY, "it is not verified yet"
    samples = await it.manager.verification_samples(0, 1)
    assert samples is not None
    report = await it.manager.verify_update(0, 1, trainer_logprobs(samples), True)
    assert report.passed
    assert isinstance(await it.manager.next_batch(0), TokenBatch)
    await it.manager.stop()


async def test_engine_that_dies_before_its_verification_gets_the_next_version(
    tmp_path: Path,
) -> None:
    it = await Run(tmp_path, restarting(2), WrongEngines("nothing", [])).started()
    await it.publish(0)
    samples = await it.send(1)
    assert samples is not None
    dead = it.engines.now[0]
    dead.crash()
    while it.engines.now[0] is dead:
        await asyncio.sleep(0.01)
    report = await it.manager.verify_update(0, 1, trainer_logprobs(samples), True)
    assert not report.passed and it.up == ["engine1.1"]
    while await it.manager.next_batch(0) is not TrainerTask.SEND_WEIGHTS:
        pass
    report = await it.publish(2)
    assert report.passed and it.up == ["engine1.1", "engine0.2"]
    await it.manager.stop()


async def test_tokens_are_discarded_when_their_verification_is_abandoned(tmp_path: Path) -> None:
    """The trainer starts the next update although it has not verified this one."""
    it = await Run(tmp_path, never_idle("pipeline"), WrongEngines("nothing", [])).started()
    await it.publish(0)
    assert isinstance(await it.manager.next_batch(0), TokenBatch)
    assert await it.send(1) is not None
    engine = it.engines.now[0]
    generated = engine.tokens_generated
    while engine.tokens_generated < generated + 4:
        await asyncio.sleep(0.001)
    await it.publish(2)
    tokens = it.manager.status()["tokens"]
    while it.manager.status()["tokens"] < tokens + 8:
        await asyncio.sleep(0.001)
    await it.manager.stop()
    versions = {
        segment.version.number
        for trajectory in trajectories_in(tmp_path).values()
        for segment in trajectory.segments
    }
    assert 1 not in versions and 2 in versions


async def test_abort_waits_when_the_verification_of_an_engine_is_slow(tmp_path: Path) -> None:
    """A stream whose tokens wait for verification does not end, which is not the engine's fault."""
    it = await Run(tmp_path, settings("pipeline"), WrongEngines("nothing", [])).started()
    samples = await it.send(0)
    driver = it.manager._driver
    while not len(driver._generation):
        await asyncio.sleep(0.001)
    with mock.patch("megatron_async.rollout.generation._ABORT_WAIT_SECONDS", 0.001):
        aborting = asyncio.create_task(
            driver._generation.abort(driver._generation.mark_for_abort())
        )
        await asyncio.sleep(0.1)  # All tries of an abort take much less time.
        assert it.up == ["engine0.0"] and not aborting.done()
        assert samples is not None
        await it.manager.verify_update(0, 0, trainer_logprobs(samples), True)
        await aborting
    assert it.up == ["engine0.0"]
    await it.manager.stop()


@pytest.mark.parametrize("preset", ["pipeline", "async", "copris"])
async def test_running_requests_are_verified_and_ended_at_the_last_update(
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


class WeightsEngine:
    """Engine that reports version 0.1 whatever weights it has."""

    dtype = "float32"

    def __init__(self, engine_id: str, weights: str) -> None:
        self.engine_id, self._weights = engine_id, weights

    async def version(self) -> PolicyVersion:
        return PolicyVersion(0, 1)

    async def checksum(self) -> str:
        return self._weights


async def test_checksum_is_forgotten_when_all_its_engines_had_wrong_weights() -> None:
    """Otherwise every engine that gets the right weights later would be replaced, forever."""
    checks, version = WeightChecks(settings("async"), list), PolicyVersion(0, 1)

    async def passed(*engines: WeightsEngine, error: float) -> list[str]:
        good = (await checks.check_checksums(list(engines), version)).good  # type: ignore[arg-type]
        samples = [
            ProbeSample(e.engine_id, np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, -1.0))
            for e in good
        ]
        trainer_T = np.tile(np.array([0.0, error - 1.0], np.float32), len(samples))
        outcome, _ = checks.check_ratios(good, samples, trainer_T, version, float32=True)
        return [engine.engine_id for engine in outcome.good]

    assert await passed(WeightsEngine("a", "old"), WeightsEngine("b", "old"), error=1.0) == []
    assert await passed(WeightsEngine("a", "new"), WeightsEngine("b", "new"), error=0.0) == [
        "a",
        "b",
    ]
    assert await passed(WeightsEngine("c", "old"), error=0.0) == [], (
        "engines a and b have the right weights"
    )
