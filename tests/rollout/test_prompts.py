"""Tests which prompts come next: by pass rate, by priority, and when dynamic sampling keeps no
group."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config.data import DifficultyConfig
from megatron_async.engines.interface import GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.rollout import admission
from megatron_async.rollout.admission import FilterStreak
from megatron_async.rollout.manager import ResumePoint
from megatron_async.rollout.prompts import TaskPrompts
from megatron_async.trajectory.types import PolicyVersion, Prompt
from tests.rollout.stand_ins import Fixed, settings
from tests.rollout.test_manager import Trainer

PROBLEMS = 10
HARD, EASY = 3, 7
POOLS = [{"up_to": 0.0, "share": 0.0}, {"up_to": 0.9, "share": 1.0}, {"up_to": 1.0, "share": 0.25}]


class Epochs(Fixed):
    """Task that repeats ten problems. One is never solved, one always, and the others half the
    time."""

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        numbers = [(position + i) % PROBLEMS for i in range(count)]
        return [Prompt(np.array([5, n], np.int32), "epochs") for n in numbers]


def config(**changes: Any) -> DifficultyConfig:
    return DifficultyConfig.model_validate({"pools": POOLS, "min_attempts": 4, **changes})


def number(prompt: Prompt) -> int:
    return int(prompt.token_ids[1])


def answer(prompts: TaskPrompts, prompt: Prompt) -> None:
    """Score four responses to `prompt`."""
    right = {HARD: 0, EASY: 4}.get(number(prompt), 2)
    for attempt in range(4):
        prompts.scored(prompt, float(attempt < right))


def trained(prompts: TaskPrompts, count: int) -> list[int]:
    used = []
    for _ in range(count):
        (prompt,) = prompts.take(1)
        used.append(number(prompt))
        answer(prompts, prompt)
    return used


def test_pool_prompts_are_used_with_the_share_of_their_pool(tmp_path: Path) -> None:
    prompts = TaskPrompts(Epochs(), config(), tmp_path / "d.jsonl", 0)
    assert sorted(trained(prompts, PROBLEMS)) == list(range(PROBLEMS)), (
        "not every prompt was used once"
    )
    used = trained(prompts, 400)
    turns = 400 / (PROBLEMS - 2 + 0.25)
    assert used.count(HARD) == 0
    assert used.count(EASY) == pytest.approx(turns / 4, rel=0.6)
    assert used.count(0) == pytest.approx(turns, rel=0.1)
    metrics = prompts.take_metrics()
    assert (metrics["difficulty/prompts"], metrics["difficulty/pool_0"]) == (10, 0.1)
    assert metrics["difficulty/pass_rate"] == pytest.approx(0.5)
    assert metrics["difficulty/skipped"] > 50
    assert prompts.take_metrics()["difficulty/skipped"] == 0


def test_restored_run_repeats_the_prompts_after_its_last_group(tmp_path: Path) -> None:
    prompts = TaskPrompts(Epochs(), config(), tmp_path / "d.jsonl", 0)
    trained(prompts, 60)
    following = [number(p) for p in prompts.take(20)]
    prompts.close()
    # The store has 60 groups; the prompts read after them were lost.
    restored = TaskPrompts(Epochs(), config(), tmp_path / "d.jsonl", 60)
    assert [number(p) for p in restored.take(20)] == following
    restored.close()
    again = TaskPrompts(Epochs(), config(), tmp_path / "d.jsonl", 60)
    assert [number(p) for p in again.take(20)] == following


def test_group_n_is_prompt_n_when_there_are_no_pools(tmp_path: Path) -> None:
    prompts = TaskPrompts(Epochs(), config(pools=[]), tmp_path / "d.jsonl", 13)
    assert trained(prompts, 12) == [(13 + i) % PROBLEMS for i in range(12)]
    assert prompts.take_metrics() == {} and not (tmp_path / "d.jsonl").exists()


def test_prompts_continue_in_order_when_pools_are_added_to_a_run(tmp_path: Path) -> None:
    prompts = TaskPrompts(Epochs(), config(), tmp_path / "d.jsonl", 13)
    assert trained(prompts, 3) == [3, 4, 5]


def test_prompt_is_used_after_the_maximum_when_every_pool_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.rollout.prompts._MAX_SKIPPED", 30)
    pools = [{"up_to": 0.99, "share": 0}, {"up_to": 1, "share": 0.001}]
    prompts = TaskPrompts(Epochs(), config(pools=pools), tmp_path / "d.jsonl", 0)
    trained(prompts, 10)
    assert len(trained(prompts, 3)) == 3


@pytest.mark.parametrize(
    ("pools", "sentence"),
    [
        ([{"up_to": 0.5, "share": 1}], r"must ascend and end up_to 1, got \[0.5\]"),
        ([{"up_to": 1, "share": 1}, {"up_to": 0.5, "share": 1}], "must ascend"),
        ([{"up_to": 1, "share": 0}], "drop every prompt"),
    ],
)
def test_pools_are_refused_when_they_are_invalid(
    pools: list[dict[str, float]], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        config(pools=pools)


class Ranked(Fixed):
    """Task of the prompts 0 to 3, each with a higher priority than the one before."""

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        numbers = range(position, min(position + count, 4))
        return [Prompt(np.array([5, i], np.int32), "fixed", priority=i) for i in numbers]


class Endless(SimulatedEngine):
    """Simulated engine that sends a first token for each request and no end, and records the
    prompts in order."""

    prompts: list[int]
    weights_version: PolicyVersion

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.prompts.append(int(request.input_ids[1]))
        first = np.array([7], np.int32), np.array([-1.0], np.float32)
        yield TokenChunk(*first, self.weights_version)
        await asyncio.Event().wait()


async def submitted(folder: Path, resume: ResumePoint) -> list[int]:
    """Return the prompts of the first eight requests of one session of a run; each of them got a
    token."""
    config = settings("copris")
    schedule = config.schedule.model_copy(update={"concurrency": 8, "groups_per_batch": 4})
    config = config.model_copy(update={"schedule": schedule})
    trainer = Trainer(folder, config, Ranked())
    await trainer.manager.start()
    engine = trainer.engines.all[0]
    engine.__class__ = Endless
    assert isinstance(engine, Endless)
    engine.prompts, engine.weights_version = [], PolicyVersion(resume.lineage, 0)
    await trainer.begin(resume)
    while len(engine.prompts) < 8 or trainer.manager.status()["tokens"] < 8:
        await asyncio.sleep(0.01)
    await trainer.manager.stop()
    return engine.prompts


async def test_prompts_are_submitted_and_resumed_in_order_of_priority(tmp_path: Path) -> None:
    assert await submitted(tmp_path, ResumePoint(0)) == [3, 3, 2, 2, 1, 1, 0, 0]
    assert await submitted(tmp_path, ResumePoint(1, 0, 0)) == [3, 3, 2, 2, 1, 1, 0, 0]


def test_filter_streak_counts_rounds_until_a_group_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_FILTERED_ROUNDS", 3)
    rounds = FilterStreak(4)
    assert [rounds.dropped(0) for _ in range(4)] == [False, False, False, True]
    assert [rounds.dropped(0) for _ in range(4)] == [False] * 4, "a later round was reported again"
    assert not rounds.too_many_rounds
    assert [rounds.dropped(1) for _ in range(4)] == [False, False, False, True]
    for _ in range(8):
        rounds.dropped(1)
    assert rounds.too_many_rounds
    rounds.emitted()
    assert not rounds.too_many_rounds
    for _ in range(12):
        rounds.dropped(0)
    assert rounds.too_many_rounds
    assert "dropped the last 12 responses (3 batches' worth)" in rounds.message()
