"""Tests a running driver whose rewards fail, score whole groups, or are slower than generation.

Rewards that hang, crash, raise or are unavailable are counted and do not stop the run. A group is
scored once, when it is complete. Lag stays bounded.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.rollout.manager import ResumePoint
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.trajectory.types import Prompt, TrajectoryState
from tests.rollout.stand_ins import Fixed, run, settings, trajectories_in
from tests.rollout.test_manager import Trainer

OWN = Path(__file__).parents[1] / "scoring" / "rewards" / "own.py"
FAILING_STEPS = 3


class Pooled(Fixed):
    """Task of numbered prompts that a pool of scorer processes scores."""

    def __init__(self, pool: LocalScorerPool) -> None:
        self.pool = pool

    @property
    def failures(self) -> Mapping[str, str]:  # type: ignore[override]
        return self.pool.failures

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        return await self.pool.score(prompt, response_ids)


@pytest.mark.slow
def test_run_continues_and_counts_faults_when_rewards_fail(tmp_path: Path) -> None:
    names = ("scorer_that_hangs", "sleeps", "dies", "fails", "not_there")
    rewards = [{"name": f"{OWN}:{name}", "label": name, "timeout_seconds": 0.2} for name in names]
    # Scorer processes restart often, so a batch may take long.
    waits = {"trainer": {"wait_for_batch_seconds": 120}}
    config = build_config(merge(settings("copris").model_dump(), {"reward": rewards, **waits}))
    write_character_tokenizer(tmp_path)
    pool = LocalScorerPool(config.scorers, str(tmp_path))
    counts: Counter[str] = Counter()
    warnings: dict[str, str] = {}

    async def body() -> None:
        trainer = await Trainer(tmp_path, config, Pooled(pool)).started()
        for step in range(FAILING_STEPS):
            batch = await trainer.batch()
            assert not batch.rewards_S.any()
            counts.update(
                {
                    name: int(value)
                    for name, value in batch.extra_metrics.items()
                    if name.startswith("rollout/scorer_")
                }
            )
            warnings.update((await trainer.publish(0, step + 1)).warnings)
        await trainer.manager.stop()

    try:
        run(body())
    finally:
        pool.close()
    each = FAILING_STEPS * config.schedule.groups_per_batch * config.schedule.group_size
    # The hanging scorer and the sleeping scorer exceed the limit.
    assert counts["rollout/scorer_timeouts"] >= 2 * each
    for kind in ("crashes", "errors", "unavailable"):
        assert counts[f"rollout/scorer_{kind}"] >= each, counts
    kinds = ("errors", "timeouts", "crashes", "unavailable")
    assert {f"scorer_{kind}" for kind in kinds} <= warnings.keys()
    message = r"the first by reward fails: KeyError: 'always' at .*own\.py:\d+; try"
    assert re.search(message, warnings["scorer_errors"])


GROUP_STEPS = 4


class Ranks(Fixed):
    """Scorer of groups whose reward is the rank by length; with `fails`, one member of every other
    prompt fails at first."""

    def __init__(self, group_size: int, fails: bool) -> None:
        self.group_size = group_size
        self.fails = fails
        self.calls: Counter[int] = Counter()

    async def score_group(
        self, prompt: Prompt, responses: Sequence[Sequence[int]]
    ) -> list[tuple[float | None, dict[str, float]]]:
        assert len(responses) == self.group_size, "the group was scored before it was complete"
        number = int(prompt.token_ids[1])
        self.calls[number] += 1
        order = sorted(range(self.group_size), key=lambda i: len(responses[i]))
        scores: list[tuple[float | None, dict[str, float]]] = [
            (float(order.index(i)), {"length": float(len(responses[i]))})
            for i in range(self.group_size)
        ]
        if self.fails and number % 2 == 0 and self.calls[number] == 1:
            scores[0] = (None, {})
        return scores


@pytest.mark.parametrize("policy", ["zero", "regenerate", "drop"])
async def test_group_is_scored_once_when_it_is_complete(tmp_path: Path, policy: str) -> None:
    config = build_config(
        merge(
            settings("copris").model_dump(),
            {
                "task": {"on_scorer_timeout": policy},
                "reward": [{"name": "any.module:rank", "group": True}],
            },
        )
    )
    scorer = Ranks(config.schedule.group_size, fails=policy != "zero")
    regenerated = 0.0
    trainer = await Trainer(tmp_path, config, scorer).started()
    for step in range(GROUP_STEPS):
        batch = await trainer.batch()
        regenerated += batch.extra_metrics["rollout/regenerated"]
        assert batch.extra_metrics["reward/length"] > 1.0
        await trainer.publish(0, step + 1)
    await trainer.manager.stop()
    states = [one.state for one in trajectories_in(tmp_path).values()]
    dropped = states.count(TrajectoryState.DROPPED)
    assert (regenerated > 0) == (policy == "regenerate")
    assert (dropped > 0) == (policy == "drop")
    if policy != "regenerate":
        assert set(scorer.calls.values()) == {1}


STEPS = 10
GROUPS, SIZE = 2, 2
_POLL_SECONDS = 0.001


class Slowest(Fixed):
    """Scorer that works on one response at a time, and only while finished groups prevent the start
    of new groups, no request runs, and the batch of `step` is not complete.

    So generation is always faster than scoring, and scoring never gets ahead while the trainer
    works.
    """

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.step = 0
        self._one_at_a_time = asyncio.Lock()

    def _rests(self) -> bool:
        assert self.trainer is not None
        driver = self.trainer.manager._driver
        view = driver._scheduler.view()
        may_start = view.finished_groups < driver._scheduler.config.max_waiting_batches * GROUPS
        return may_start or bool(driver.status()["running"]) or view.next_step > self.step

    async def score(
        self, prompt: Prompt, response_ids: Any
    ) -> tuple[float | None, dict[str, float]]:
        async with self._one_at_a_time:
            while self._rests():
                await asyncio.sleep(_POLL_SECONDS)
        return await super().score(prompt, response_ids)


def config(preset: str) -> RunConfig:
    """Return settings with as many concurrent requests as one batch has trajectories."""
    sizes = {"groups_per_batch": GROUPS, "group_size": SIZE, "concurrency": GROUPS * SIZE}
    return build_config(merge(settings(preset).model_dump(), {"schedule": sizes}))


@pytest.mark.parametrize("preset", ["copris", "pipeline"])
async def test_lag_stays_bounded_when_scores_are_slow(tmp_path: Path, preset: str) -> None:
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
        parts = [metrics[f"rollout/lag_{part}_queue_mean"] for part in ("before", "in")]
        assert sum(parts) == pytest.approx(metrics["rollout/lag_mean"]) and min(parts) >= 0
        queues.append(metrics["rollout/score_queue_max"])
        waited.append(metrics.get("rollout/score_seconds", 0.0))
        report = await trainer.publish(0, step + 1)
        warnings.extend(name for name, _ in report.warnings)
    await trainer.manager.stop()
    in_flight = 1  # Number of batches that the running requests make up.
    # With `pipeline` one more batch is being trained meanwhile.
    in_training = 1 if preset == "pipeline" else 0
    assert max(lags) <= 1 + in_flight + in_training, lags
    assert max(queues) > GROUPS * SIZE, "the run did not wait for scores"
    assert max(waited) > 0
    if preset == "copris":
        # The number of warnings depends on the machine's speed.
        assert "scoring_backlog" in warnings
