"""A live driver with a reward that takes whole groups: each is scored once, when it is whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from megatron_async.config import build_config
from megatron_async.config.load import merge
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.types import Prompt, TrajectoryState
from tests.rollout.stand_ins import Fixed, settings
from tests.rollout.test_manager import Trainer

STEPS = 4


class Ranks(Fixed):
    """The reward is the place by length; one member of every other prompt fails at first."""

    def __init__(self, group_size: int, fails: bool) -> None:
        self.group_size = group_size
        self.fails = fails
        self.calls: Counter[int] = Counter()

    async def score_group(
        self, prompt: Prompt, responses: Sequence[Sequence[int]]
    ) -> list[tuple[float | None, dict[str, float]]]:
        assert len(responses) == self.group_size, "scored before it was whole"
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
async def test_a_group_is_scored_as_one(tmp_path: Path, policy: str) -> None:
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
    for step in range(STEPS):
        batch = await trainer.batch()
        regenerated += batch.extra_metrics["rollout/regenerated"]
        assert batch.extra_metrics["reward/length"] > 1.0
        await trainer.publish(0, step + 1)
    await trainer.manager.stop()
    with closing(StoreReader(tmp_path / "store.sqlite")) as reader:
        dropped = sum(entry.state is TrajectoryState.DROPPED for entry in reader.summaries())
    assert (regenerated > 0) == (policy == "regenerate")
    assert (dropped > 0) == (policy == "drop")
    if policy != "regenerate":
        assert set(scorer.calls.values()) == {1}
