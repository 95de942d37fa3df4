"""A live driver whose scorer fails: what becomes of the response, and of its group."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.config.load import merge
from megatron_async.rollout.manager import ResumePoint
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.types import Prompt, TrajectoryState
from tests.rollout.stand_ins import Fixed, run, settings
from tests.rollout.test_manager import Trainer

STEPS = 4


class FailsAtFirst(Fixed):
    """The first response to every other prompt gets no score."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    async def score(
        self, prompt: Prompt, response_ids: Any
    ) -> tuple[float | None, dict[str, float]]:
        number = int(prompt.token_ids[1])
        if number % 2 or number in self._seen:
            return await super().score(prompt, response_ids)
        self._seen.add(number)
        return None, {}


@pytest.mark.parametrize("policy", ["regenerate", "drop"])
def test_a_response_without_a_score_costs_itself_or_its_group(tmp_path: Path, policy: str) -> None:
    config = build_config(
        merge(settings("copris").model_dump(), {"task": {"on_scorer_timeout": policy}})
    )
    totals = {"regenerated": 0.0}

    async def body() -> None:
        trainer = Trainer(tmp_path, config, FailsAtFirst())
        await trainer.manager.start()
        await trainer.begin(ResumePoint(0))
        for step in range(STEPS):
            batch = await trainer.batch()
            assert batch.num_sequences == 2
            for name in totals:
                totals[name] += batch.extra_metrics[f"rollout/{name}"]
            await trainer.publish(0, step + 1)
        await trainer.manager.stop()

    run(body())
    with closing(StoreReader(tmp_path / "store.sqlite")) as reader:
        dropped = sum(entry.state is TrajectoryState.DROPPED for entry in reader.summaries())
    if policy == "regenerate":
        assert totals["regenerated"] > 0 and dropped == 0
    else:
        assert totals["regenerated"] == 0 and dropped > 0
