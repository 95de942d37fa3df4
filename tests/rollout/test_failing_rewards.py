"""A live driver whose rewards hang, crash, raise or are unavailable goes on and counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_async.config import build_config
from megatron_async.config.load import merge
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.trajectory.types import Prompt
from tests.rollout.stand_ins import Fixed, run, settings
from tests.rollout.test_manager import Trainer

OWN = Path(__file__).parents[1] / "scoring" / "rewards" / "own.py"
STEPS = 3


class Pooled(Fixed):
    """The numbered prompts, scored by a pool of scorer processes."""

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
def test_failing_rewards_of_all_kinds_are_counted_and_stop_nothing(tmp_path: Path) -> None:
    names = ("scorer_that_hangs", "sleeps", "dies", "fails", "not_there")
    rewards = [{"name": f"{OWN}:{name}", "label": name, "timeout_seconds": 0.2} for name in names]
    waits = {"trainer": {"wait_for_batch_seconds": 120}}  # processes are started again and again
    config = build_config(merge(settings("copris").model_dump(), {"reward": rewards, **waits}))
    write_character_tokenizer(tmp_path)
    pool = LocalScorerPool(config.scorers, str(tmp_path))
    counts: Counter[str] = Counter()
    warnings: dict[str, str] = {}

    async def body() -> None:
        trainer = await Trainer(tmp_path, config, Pooled(pool)).started()
        for step in range(STEPS):
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
    each = STEPS * config.schedule.groups_per_batch * config.schedule.group_size
    assert counts["rollout/scorer_timeouts"] >= 2 * each  # the hanging scorer and the sleeper
    for kind in ("crashes", "errors", "unavailable"):
        assert counts[f"rollout/scorer_{kind}"] >= each, counts
    kinds = ("errors", "timeouts", "crashes", "unavailable")
    assert {f"scorer_{kind}" for kind in kinds} <= warnings.keys()
    place = r"the first by reward fails: KeyError: 'always' at .*own\.py:\d+; try"
    assert re.search(place, warnings["scorer_errors"])
