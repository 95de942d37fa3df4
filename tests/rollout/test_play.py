"""Evaluations play episodes to their ends; rewards read the whole conversation."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.rollout.evaluate import Evaluation, Evaluator
from megatron_async.rollout.respond import SharedEngines
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.tasks import build_task
from megatron_async.trajectory.types import PolicyVersion
from tests.environments.inside import InsidePlace
from tests.rollout.test_episodes import configured

REWARD = '''
def whole(sample):
    """10 for each message; whether the response is the last of them."""
    last = sample.messages[-1]
    parts = {"last": float((last["role"], last["content"]) == ("assistant", sample.response))}
    return 10.0 * len(sample.messages), parts
'''


@pytest.mark.parametrize("group", [False, True])
def test_samples_of_an_evaluation_are_conversations_that_the_reward_has_read(
    tmp_path: Path, group: bool
) -> None:
    write_character_tokenizer(tmp_path)
    each = "[whole(sample) for sample in samples]"
    both = f"{REWARD}\n\ndef of_all(samples):\n    return {each}\n"
    (tmp_path / "reward.py").write_text(both)
    name = f"{tmp_path / 'reward.py'}:{'of_all' if group else 'whole'}"
    config = configured(
        tmp_path,
        reward={"name": name, "group": group, "label": "whole"},
        eval={"prompts": 3, "samples": 2, "save_samples": 3, "temperature": 1.0},
    )
    model = SimulatedEngineModel(mean_length=6, step_seconds=0.001, longest_tokens=600)

    async def evaluated() -> Evaluation:
        engine = SimulatedEngine("engine", model)
        engine.set_weights(PolicyVersion(0, 3))
        task = build_task(config.task, config.model.path, config.eval, plays=True)
        workers = EnvironmentWorkers(config, InsidePlace())  # type: ignore[arg-type]
        with closing(LocalScorerPool(config.scorers, config.model.path)) as pool:
            evaluator = Evaluator(config, task, pool, workers)
            return await evaluator.evaluate(SharedEngines(lambda: [engine]), PolicyVersion(0, 3))

    found = asyncio.run(asyncio.wait_for(evaluated(), 120))
    samples = found.samples()
    assert len(samples) == 6
    for sample in samples:
        messages = sample["messages"]
        assert messages[0]["content"].startswith("seed ")
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert sample["response"] == messages[-1]["content"]
        answers = messages[1::2]
        own = sum(0.25 * (len(answer["content"]) % 3) for answer in answers)
        assert sample["reward"] == pytest.approx(10.0 * len(messages) + own)
        assert sample["parts"]["last"] == 1.0
        assert sample["parts"]["seen"] == len(answers), "the environment's parts, added up"
        assert sample["versions"] == ["0.3"]
    assert len({len(sample["messages"]) for sample in samples}) > 1
