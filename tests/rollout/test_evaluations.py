"""Evaluations beside training and exact ones: what they measure, and what they may not disturb.

Simulated engines: their tokens follow from the tokens before, so that a response that is cut off
and goes on elsewhere must equal one that never was.
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
from megatron_async.trajectory.types import PolicyVersion
from tests.rollout.stand_ins import Engines
from tests.rollout.stand_ins import settings as stand_in_settings
from tests.rollout.test_manager import Trainer

LONG = SimulatedEngineModel(mean_length=400, step_seconds=0.001, stream_interval=2)


class Watched(SimulatedEngine):
    """Records how many evaluation requests run, and whether one does while weights change."""

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
    """Let an evaluation beside training run two requests on an engine."""
    monkeypatch.setattr(evaluate, "REQUESTS_PER_ENGINE", 2)


def settings(preset: str, engines: int = 1, steps: int = 10_000, **evaluation: Any) -> RunConfig:
    """Rollouts of 16 tokens, evaluation responses of up to 40."""
    config = stand_in_settings(preset, engines, max_restarts=3)
    own = {"prompts": 4, "every_steps": 1, "max_new_tokens": 40, **evaluation}
    tree = config.model_dump(mode="json") | {"eval": config.eval.model_dump() | own}
    tree |= {"steps": steps, "sampling": {"max_new_tokens": 16}}
    return build_config(tree)


def texts(evaluation: Evaluation) -> list[str]:
    return [sample["response"] for sample in evaluation.samples()]


async def begun(trainer: Trainer) -> tuple[Evaluation, ...]:
    """The run has begun; its first, exact evaluation."""
    await trainer.manager.start()
    await trainer.manager.attach(ResumePoint(0))
    assert (await trainer.publish(0, 0)).evaluation_due
    return await trainer.manager.evaluate(0, 0)


@pytest.mark.parametrize("preset", ["copris", "pipeline", "async"])
async def test_training_goes_on_beside_an_evaluation_which_is_named_by_its_first_version(
    tmp_path: Path, preset: str
) -> None:
    trainer = Trainer(tmp_path, settings(preset), engines=LongEngines())
    (first,) = await begun(trainer)
    found: list[Evaluation] = []
    number = 0
    while not found:
        assert (await trainer.batch()).step == number
        number += 1
        report = await trainer.publish(0, number)
        assert not report.evaluation_due, "training is not held up"
        found += report.evaluations
    (beside,) = found
    assert number > 2 and beside.number == 1
    metrics = beside.metrics()
    ends = metrics["eval/version_oldest"], metrics["eval/version_newest"]
    assert 1 <= ends[0] < metrics["eval/version_mean"] < ends[1] <= number
    for sample in beside.samples():
        versions = [PolicyVersion(*map(int, text.split("."))) for text in sample["versions"]]
        assert versions == sorted(versions) and versions
    assert texts(beside) == texts(first), "cut off or not, it is the same response"
    (engine,) = trainer.engines.all
    assert isinstance(engine, Watched)
    assert not engine.changed_under_one
    warnings = trainer.manager._driver.statistics.warnings
    assert "is not evaluated: the evaluation of 0.1 still" in warnings["evaluation_skipped"]
    await trainer.manager.stop()


async def test_one_beside_training_takes_few_slots_and_an_exact_one_many(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, settings("async"), engines=LongEngines())
    await begun(trainer)
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
async def test_an_exact_evaluation_is_of_one_version_and_the_trainer_waits_for_it(
    tmp_path: Path, preset: str, blocking: bool | None
) -> None:
    trainer = Trainer(tmp_path, settings(preset, blocking=blocking), engines=LongEngines())
    await begun(trainer)
    await trainer.batch()
    assert (await trainer.publish(0, 1)).evaluation_due
    (found,) = await trainer.manager.evaluate(0, 1)
    metrics = found.metrics()
    assert {metrics[f"eval/version_{e}"] for e in ("oldest", "newest", "mean")} == {1.0}
    assert {tuple(sample["versions"]) for sample in found.samples()} == {("0.1",)}
    assert not (await trainer.publish(0, 1)).evaluation_due, "it has been measured"
    await trainer.manager.stop()


async def test_the_last_evaluation_is_exact_and_waits_for_the_one_under_way(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path, settings("async", steps=2), engines=LongEngines())
    await begun(trainer)
    await trainer.batch()
    assert not (await trainer.publish(0, 1)).evaluation_due
    await trainer.batch()
    report = await trainer.publish(0, 2)
    assert report.evaluation_due and not report.evaluations
    beside, last = await trainer.manager.evaluate(0, 2)
    assert (beside.number, last.number) == (1, 2)
    assert beside.metrics()["eval/version_newest"] == 2
    assert {tuple(sample["versions"]) for sample in last.samples()} == {("0.2",)}
    await trainer.manager.stop()


async def test_an_engine_that_dies_beside_training_costs_the_evaluation_no_response(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path, settings("async", engines=2), engines=LongEngines())
    (first,) = await begun(trainer)
    await trainer.batch()
    await trainer.publish(0, 1)
    trainer.engines.all[1].crash()
    found: list[Evaluation] = []
    number = 1
    while not found:
        batch = await trainer.manager.next_batch(0)  # None: the restarted one wants weights
        number += batch is not None
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
async def test_one_beside_training_that_fails_is_reported_and_the_run_goes_on(
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
    await begun(trainer)
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


async def test_a_stream_that_an_engine_does_not_end_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.rollout.responses._END_SECONDS", 0.1)

    class Deaf(Watched):
        async def abort(self, request_ids: Any) -> None:
            await super().abort([name for name in request_ids if not name.startswith("eval")])

    trainer = Trainer(tmp_path, settings("async"), engines=LongEngines())
    (first,) = await begun(trainer)
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


def test_a_schedule_that_drains_evaluates_exactly_unless_it_is_asked_not_to() -> None:
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
