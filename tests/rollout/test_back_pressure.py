"""A live driver with a scorer that is slower than any generation: lag stays bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.rollout.manager import ResumePoint
from megatron_async.trajectory.types import Prompt
from tests.rollout.stand_ins import Fixed, settings
from tests.rollout.test_manager import Trainer

STEPS = 10
GROUPS, SIZE = 2, 2
_POLL_SECONDS = 0.001


class Slowest(Fixed):
    """One scorer that works only while no request runs and the batch of `step` is not complete.

    So generation always outruns it, and it never gets ahead while the trainer works.
    """

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.step = 0
        self._one_at_a_time = asyncio.Lock()

    def _rests(self) -> bool:
        assert self.trainer is not None
        driver = self.trainer.manager._driver
        return bool(driver.status()["running"]) or driver._scheduler.view().next_step > self.step

    async def score(
        self, prompt: Prompt, response_ids: Any
    ) -> tuple[float | None, dict[str, float]]:
        async with self._one_at_a_time:
            while self._rests():
                await asyncio.sleep(_POLL_SECONDS)
        return await super().score(prompt, response_ids)


def config(preset: str) -> RunConfig:
    """As many requests in flight as one batch has."""
    sizes = {"groups_per_batch": GROUPS, "group_size": SIZE, "concurrency": GROUPS * SIZE}
    return build_config(merge(settings(preset).model_dump(), {"schedule": sizes}))


@pytest.mark.parametrize("preset", ["copris", "pipeline"])
async def test_lag_stays_bounded_however_slow_scores_are(tmp_path: Path, preset: str) -> None:
    lags: list[float] = []
    queues: list[float] = []
    waited: list[float] = []
    warnings: list[str] = []

    scorer = Slowest()
    scorer.trainer = trainer = Trainer(tmp_path, config(preset), scorer)
    await trainer.manager.start()
    await trainer.begin(ResumePoint(0))
    for step in range(STEPS):
        scorer.step = step
        metrics = (await trainer.batch()).extra_metrics
        lags.append(metrics["rollout/lag_max"])
        queues.append(metrics["rollout/score_queue_max"])
        waited.append(metrics.get("rollout/score_seconds", 0.0))
        report = await trainer.publish(0, step + 1)
        warnings.extend(name for name, _ in report.warnings)
    await trainer.manager.stop()
    in_flight = 1  # batches' worth
    assert max(lags) <= 1 + in_flight + (preset == "pipeline"), lags  # one more is being trained
    assert max(queues) > GROUPS * SIZE, "scores were not what it waited for"
    assert max(waited) > 0
    if preset == "copris":
        assert "scoring_backlog" in warnings  # how often depends on how fast the machine is
