"""Tests blocking evaluations and evaluations concurrent with training: what they measure, and that
they do not disturb.

The tokens of a simulated engine depend only on the tokens before them, so a response that is cut
off and resumed elsewhere must equal an uninterrupted one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.engines.interface import EngineError, GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.errors import UserError
from megatron_async.rollout import evaluate
from megatron_async.rollout.evaluate import Evaluation
from megatron_async.rollout.manager import ResumePoint
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion
from tests.rollout.stand_ins import Engines
from tests.rollout.stand_ins import settings as stand_in_settings
from tests.rollout.test_manager import Trainer

LONG = SimulatedEngineModel(mean_length=400, step_seconds=0.001, stream_interval=2)


class Watched(SimulatedEngine):
    """Simulated engine that records how many evaluation requests run, and whether any runs while
    weights change."""

    most = 0
    changed_under_one = False

    def _evaluating(self) -> int:
        return sum(name.startswith("eval") for name in [*self._running, *self._queued])

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in super().generate(request):
            self.most = max(self.most, self._evaluating())
            yield chunk

    def set_weights(self, version: PolicyVersion, weights: str = "") -> None:
        self.changed_under_one |= self._evaluating() > 0
        super().set_weights(version, weights)


class LongEngines(Engines):
    async def launch(self, index: int) -> SimulatedEngine:
        self.all.append(Watched(f"engine{index}", LONG))
        return self.all[-1]


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit a concurrent evaluation to two requests on an engine."""
    monkeypatch.setattr(evaluate, "REQUESTS_PER_ENGINE", 2)


def settings(preset: str, engines: int = 1, steps: int = 10_000, **evaluation: Any) -> RunConfig:
    """Return settings with rollouts of at most 16 tokens and evaluation responses of at most 80."""
    config = stand_in_settings(preset, engines, max_restarts=3)
    own = {"prompts": 4, "every_steps": 1, "max_new_tokens": 80, **evaluation}
    tree = config.model_dump(mode="json") | {"eval": config.eval.model_dump() | own}
    tree |= {"steps": steps, "sampling": {"max_new_tokens": 16}}
    return build_config(tree)


def texts(evaluation: Evaluation) -> list[str]:
    return [sample["response"] for sample in evaluation.samples()]


async def started(trainer: Trainer) -> tuple[Evaluation, ...]:
    """Start the run and return its first evaluation, which is a blocking one."""
    await trainer.manager.start()
    await trainer.manager.attach(ResumePoint(0))
    assert (await trainer.publish(0, 0)).evaluation_due
    return await trainer.manager.evaluate(0, 0)


@pytest.mark.parametrize("preset", ["copris", "pipeline", "async"])
async def test_training_continues_when_an_evaluation_runs_concurrently(
    tmp_path: Path, preset: str
) -> None:
    trainer = Trainer(tmp_path, settings(preset), engines=LongEngines())
    (first,) = await started(trainer)
    found: list[Evaluation] = []
    number = 0
    while not found:
        assert (await trainer.batch()).step == number
        number += 1
        report = await trainer.publish(0, number)
        assert not report.evaluation_due, "training must not wait"
        found += report.evaluations
    (concurrent,) = found
    assert number > 2 and concurrent.number == 1
    metrics = concurrent.metrics()
    ends = metrics["eval/version_oldest"], metrics["eval/version_newest"]
    assert 1 <= ends[0] < metrics["eval/version_mean"] < ends[1] <= number
    for sample in concurrent.samples():
        versions = [PolicyVersion(*map(int, text.split("."))) for text in sample["versions"]]
        assert versions == sorted(versions) and versions
    assert texts(concurrent) == texts(first), "an interruption changed a response"
    (engine,) = trainer.engines.all
    assert isinstance(engine, Watched)
    assert not engine.changed_under_one
    warnings = trainer.manager._driver.statistics.warnings
    assert (
        "is not evaluated: the evaluation of 0.1 is still running" in warnings["evaluation_skipped"]
    )
    await trainer.manager.stop()


async def test_evaluation_uses_few_slots_when_it_is_concurrent_with_training(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path, settings("async"), engines=LongEngines())
    await started(trainer)
    (engine,) = trainer.engines.all
    assert isinstance(engine, Watched) and engine.most == 4
    engine.most, number = 0, 0
    found: tuple[Evaluation, ...] = ()
    while not found:
        await trainer.batch()
        number += 1
        found = (await trainer.publish(0, number)).evaluations
    assert engine.most == 2
    await trainer.manager.stop()


@pytest.mark.parametrize(("preset", "blocking"), [("sync", None), ("async", True)])
async def test_blocking_evaluation_measures_exactly_one_version(
    tmp_path: Path, preset: str, blocking: bool | None
) -> None:
    trainer = Trainer(tmp_path, settings(preset, blocking=blocking), engines=LongEngines())
    await started(trainer)
    await trainer.batch()
    assert (await trainer.publish(0, 1)).evaluation_due
    (found,) = await trainer.manager.evaluate(0, 1)
    metrics = found.metrics()
    assert {metrics[f"eval/version_{e}"] for e in ("oldest", "newest", "mean")} == {1.0}
    assert {tuple(sample["versions"]) for sample in found.samples()} == {("0.1",)}
    assert not (await trainer.publish(0, 1)).evaluation_due, "the version was measured already"
    await trainer.manager.stop()


async def test_last_evaluation_blocks_and_waits_for_a_running_evaluation(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, settings("async", steps=2), engines=LongEngines())
    await started(trainer)
    await trainer.batch()
    assert not (await trainer.publish(0, 1)).evaluation_due
    await trainer.batch()
    report = await trainer.publish(0, 2)
    assert report.evaluation_due and not report.evaluations
    concurrent, last = await trainer.manager.evaluate(0, 2)
    assert (concurrent.number, last.number) == (1, 2)
    assert concurrent.metrics()["eval/version_newest"] == 2
    assert {tuple(sample["versions"]) for sample in last.samples()} == {("0.2",)}
    await trainer.manager.stop()


async def test_concurrent_evaluation_is_complete_when_an_engine_dies(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path, settings("async", engines=2), engines=LongEngines())
    (first,) = await started(trainer)
    await trainer.batch()
    await trainer.publish(0, 1)
    trainer.engines.all[1].crash()
    found: list[Evaluation] = []
    number = 1
    while not found:
        # The result is not a batch if the restarted engine needs weights.
        batch = await trainer.manager.next_batch(0)
        if isinstance(batch, TokenBatch):
            number += 1
        found += (await trainer.publish(0, number)).evaluations
    assert texts(found[0]) == texts(first)
    await trainer.manager.stop()


@pytest.mark.parametrize(
    ("fails", "why"),
    [
        (False, r"did not end within 0.2 s, eval.timeout_seconds"),
        (True, "the evaluation of 0.1 failed: no evaluation today"),
    ],
)
async def test_run_continues_with_a_warning_when_a_concurrent_evaluation_fails(
    tmp_path: Path, fails: bool, why: str
) -> None:
    class Broken(Watched):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            if request.request_id.startswith("eval"):
                if fails:
                    raise EngineError("no evaluation today")
                await asyncio.Event().wait()
            async for chunk in super().generate(request):
                yield chunk

    evaluation = {"timeout_seconds": 5.0 if fails else 0.2, "max_new_tokens": 1}
    trainer = Trainer(tmp_path, settings("async", **evaluation), engines=LongEngines())
    await started(trainer)
    trainer.engines.all[0].__class__ = Broken
    warnings: list[tuple[str, str]] = []
    number = 0
    while not warnings:
        await trainer.batch()
        number += 1
        warnings += [
            one
            for one in (await trainer.publish(0, number)).warnings
            if one[0] == "evaluation_failed"
        ]
        await asyncio.sleep(0.05)
    assert why in warnings[0][1]
    await trainer.batch()
    await trainer.manager.stop()


async def test_evaluation_request_is_cut_off_when_its_engine_ignores_the_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.rollout.responses._END_SECONDS", 0.1)

    class Deaf(Watched):
        async def abort(self, request_ids: Any) -> None:
            await super().abort([name for name in request_ids if not name.startswith("eval")])

    trainer = Trainer(tmp_path, settings("async"), engines=LongEngines())
    (first,) = await started(trainer)
    trainer.engines.all[0].__class__ = Deaf
    await trainer.batch()
    await trainer.publish(0, 1)
    await trainer.batch()
    assert not (await trainer.publish(0, 2)).evaluations
    found: tuple[Evaluation, ...] = ()
    while not found:
        await asyncio.sleep(0.05)
        found = trainer.manager._attached.evaluations.take()
    assert texts(found[0]) == texts(first)
    await trainer.manager.stop()


def test_evaluations_block_by_default_when_the_schedule_drains() -> None:
    def exactly(**tree: Any) -> bool:
        return build_config(tree).evaluates_blocking

    presets = ("sync", "rapid", "copris", "pipeline", "async")
    assert [exactly(schedule={"preset": name}) for name in presets] == [True] * 2 + [False] * 3
    assert not exactly(schedule={"preset": "sync"}, eval={"blocking": False})
    assert exactly(schedule={"preset": "async"}, eval={"blocking": True})
    colocated = {"engines": {"placement": "colocated"}, "weights": {"transport": "tensor"}}
    assert exactly(**colocated)
    with pytest.raises(UserError, match=r"needs eval.blocking True, got False"):
        exactly(**colocated, eval={"blocking": False})
