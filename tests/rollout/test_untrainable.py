"""Tests that a stored trajectory that cannot be trained is dropped with its group before it is in a
batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_async.rollout.manager import ResumePoint
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import DropReason, FinishReason, PolicyVersion
from tests.rollout.short_limits import ModelEngines, config_of
from tests.rollout.stand_ins import MODEL, Fixed, trajectories_in
from tests.rollout.test_manager import Trainer

VOCABULARY = 1000


async def store_of_an_earlier_version(
    file: Path, token: int, logprob: float, state: str, prompt_token: int = 5
) -> None:
    """Write a store with two groups, of the trajectories 0 and 1, and 2 and 3.

    Args:
        token: Token in the response of trajectory 1.
        logprob: Log-prob of that token.
        state: State of trajectory 1.
        prompt_token: Prompt of the second group.
    """
    config = config_of("copris")
    store = TrajectoryStore.open(file, config.store, lineage=0, step=0, parent=None)
    first, second = Fixed().train_prompts(0, 2)
    second = replace(second, token_ids=np.array([prompt_token], np.int32))
    for prompt in (first, second):
        for one in store.add_group(prompt, 2).trajectories:
            key = store.begin_request(one.trajectory_id)
            wrong = one.trajectory_id == 1
            ids = np.array([7, token if wrong else 9, 2], np.int32)
            values = np.array([-1.0, logprob if wrong else -1.0, -1.0], np.float32)
            if wrong and state == "partial":
                store.append(key, ids[:2], values[:2], PolicyVersion(0, 0), "engine7")
                store.end_request(key)
                continue
            store.append(key, ids, values, PolicyVersion(0, 0), "engine7", end=FinishReason.STOP)
            await store.sync()
            await store.set_reward(one.trajectory_id, 1.0)
    await store.close()


async def resumed(folder: Path, steps: int) -> tuple[list[int], str]:
    """Resume the run for `steps` steps; return the trajectories that it trains and its warning."""
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    config = config_of("copris", model={"path": str(folder)})
    trainer = Trainer(folder, config, None, ModelEngines(MODEL))
    await trainer.manager.start()
    await trainer.begin(ResumePoint(1, 0, parent=0, store_position=0))
    trained: list[int] = []
    for step in range(steps):
        trained.extend((await trainer.batch()).trajectory_ids_S.tolist())
        await trainer.publish(1, step + 1)
    message = trainer.manager.status()["warnings"]["untrainable"]
    await trainer.manager.stop()
    return trained, message


@pytest.mark.parametrize("state", ["scored", "partial"])
@pytest.mark.parametrize(
    ("token", "logprob", "fault"),
    [
        (VOCABULARY, -1.0, "token 1000 is outside the vocabulary of 1000 tokens"),
        (-3, -1.0, "token -3 is outside the vocabulary"),
        (9, 5.0, "token 9 has log-prob 5"),
        (9, float("nan"), "token 9 has log-prob nan"),
    ],
)
async def test_group_of_an_invalid_trajectory_is_dropped_and_other_groups_are_trained(
    tmp_path: Path, token: int, logprob: float, fault: str, state: str
) -> None:
    await store_of_an_earlier_version(tmp_path / "store.sqlite", token, logprob, state)
    trained, message = await resumed(tmp_path, steps=3)
    assert {2, 3} <= set(trained) and not {0, 1} & set(trained)
    assert fault in message and "trajectory 1," in message and "engine7" in message
    found = trajectories_in(tmp_path)
    assert {found[n].drop_reason for n in (0, 1)} == {DropReason.NONFINITE}


async def test_trajectories_are_dropped_when_a_prompt_token_is_not_in_the_vocabulary(
    tmp_path: Path,
) -> None:
    await store_of_an_earlier_version(tmp_path / "store.sqlite", 9, -1.0, "partial", VOCABULARY)
    _, message = await resumed(tmp_path, steps=1)
    assert "token 1000 is outside the vocabulary" in message and "(from its prompt)" in message
    found = [trajectories_in(tmp_path)[number] for number in (0, 1, 2, 3)]
    dropped = [one.drop_reason is DropReason.NONFINITE for one in found]
    assert dropped == [VOCABULARY in one.prompt.token_ids for one in found]
    assert sum(dropped) == 2
