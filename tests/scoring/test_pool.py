"""Tests the number of scorers, with a pool of fake workers and a clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_async.config.reward import ScorerSettings
from megatron_async.config.rollout import TaskConfig
from megatron_async.models.tiny_model import EOS_ID, character_tokenizer, write_character_tokenizer
from megatron_async.scoring.autoscale import (
    DRAIN_SECONDS,
    REST_SECONDS,
    ScorerCount,
    queued,
    scored,
)
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.jobs import ScoreJob
from megatron_async.scoring.pool import ScorerPool
from megatron_async.trajectory.types import Prompt

PROMPT = Prompt(np.zeros(1, np.int32), "any", {})


class Worker:
    """Fake worker that scores once `may` is set; the reward is the number in the response.

    Attributes:
        seconds: Time that the worker reports for each score.
        may: Event that lets the worker score.
        busy: Number of calls that the worker handles now.
        batch_sizes: Number of jobs of each call.
        retired: Whether the pool retired the worker.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.may = asyncio.Event()
        self.busy = 0
        self.batch_sizes: list[int] = []
        self.retired = False

    async def start(self) -> list[bool]:
        return [False]

    async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        self.busy += 1
        assert self.busy == 1, "two calls at once"
        self.batch_sizes.append(len(work))
        await self.may.wait()
        self.busy -= 1
        texts = [text for piece in work for text in piece.texts]
        if "9" in texts:
            raise RuntimeError("the worker died")
        return [[ResponseScore(float(text), {}, self.seconds)] for text in texts]

    def retire(self) -> None:
        assert not self.busy
        self.retired = True


class Pool:
    """A pool of fake workers, and its clock."""

    def __init__(self, folder: Path, most: int, seconds: float = 1.0) -> None:
        write_character_tokenizer(folder)
        self.encode = character_tokenizer().encode
        self.seconds = seconds
        self.now = 1000.0
        self.all: list[Worker] = []
        settings = ScorerSettings(task=TaskConfig(scorer_workers=most))
        self.pool = ScorerPool(settings, str(folder), self._start, lambda: self.now)

    def _start(self) -> Worker:
        self.all.append(Worker(self.seconds))
        return self.all[-1]

    def score(self, digit: str) -> asyncio.Task[tuple[float | None, dict[str, float]]]:
        return asyncio.ensure_future(self.pool.score(PROMPT, self.encode(digit)))

    async def burst(self, count: int) -> list[float | None]:
        """Score `count` responses at once; no worker replies before all of them are queued."""
        for worker in self.all:
            worker.may.clear()
        tasks = [self.score(str(i % 9)) for i in range(count)]
        for _ in range(4):
            await asyncio.sleep(0)
        for worker in self.all:
            worker.may.set()
        return [reward for reward, _ in await asyncio.gather(*tasks)]


def test_pool_starts_with_one_worker_and_grows_when_scores_are_slow(tmp_path: Path) -> None:
    async def body() -> None:
        pool = Pool(tmp_path, 4)
        assert len(pool.all) == 1
        assert await pool.burst(1) == [0.0]
        assert len(pool.pool.workers) == 1, "one response needs one scorer"
        assert await pool.burst(8) == [float(i) for i in range(8)], "each gets its own reward"
        assert len(pool.pool.workers) == 4
        assert all(size == 1 for worker in pool.all for size in worker.batch_sizes)

    asyncio.run(body())


def test_pool_sends_jobs_in_batches_when_scores_are_fast(tmp_path: Path) -> None:
    async def body() -> None:
        pool = Pool(tmp_path, 4, seconds=0.001)
        await pool.burst(1)
        assert await pool.burst(100) == [float(i % 9) for i in range(100)]
        assert len(pool.pool.workers) == 1
        assert pool.all[0].batch_sizes == [1, 1, 50, 49]

    asyncio.run(body())


def test_pool_retires_only_idle_workers_after_rest_period(tmp_path: Path) -> None:
    async def body() -> None:
        pool = Pool(tmp_path, 4)
        await pool.burst(1)
        await pool.burst(8)
        for _ in range(2):
            pool.now += REST_SECONDS
            await pool.burst(1)
        assert [worker.retired for worker in pool.all].count(True) == 3
        assert len(pool.pool.workers) == 1

    asyncio.run(body())


def test_pool_uses_worker_again_when_its_call_failed(tmp_path: Path) -> None:
    async def body() -> None:
        pool = Pool(tmp_path, 1)
        pool.all[0].may.set()
        with pytest.raises(RuntimeError, match="died"):
            await pool.score("9")
        assert (await pool.score("3"))[0] == 3.0

    asyncio.run(body())


def test_pool_keeps_special_tokens_and_removes_end_token_in_texts(tmp_path: Path) -> None:
    async def texts(**task: bool) -> list[str]:
        seen = []

        class Reads(Worker):
            """Fake worker that records the texts of the responses."""

            async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
                seen.extend(text for piece in work for text in piece.texts)
                return [[ResponseScore(0.0, {}, 0.0)] for _ in work]

        settings = ScorerSettings(task=TaskConfig.model_validate(task))
        pool = ScorerPool(settings, str(tmp_path), lambda: Reads(0.0))
        await pool.score(PROMPT, [*tokenizer.encode("<think>1</think>2"), EOS_ID])
        return seen

    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.save_pretrained(tmp_path)
    assert asyncio.run(texts()) == ["<think>1</think>2"]
    assert asyncio.run(texts(skip_special_tokens=True)) == ["12"]


def at(most: int, seconds: float, count: int = 1) -> ScorerCount:
    """Return the state of a pool of `count` scorers, whose scores take `seconds` on average."""
    return ScorerCount(most, count=count, seconds=seconds)


def test_queued_adds_no_scorer_when_one_drains_queue_in_time() -> None:
    assert queued(at(8, 0.001), 100, 0.0).count == 1


def test_queued_adds_scorers_until_queue_drains_in_time() -> None:
    assert queued(at(64, DRAIN_SECONDS / 10), 200, 0.0).count == 20


def test_queued_keeps_count_of_burst_until_rest_period_ends() -> None:
    state = queued(at(8, 1.0), 8, 1.0)
    for second in range(2, int(REST_SECONDS)):
        state = queued(state, 0, float(second))
        assert state.count == 8
    state = queued(state, 0, REST_SECONDS)  # The period that ends here includes the burst.
    assert state.count == 8
    assert queued(state, 2, 2 * REST_SECONDS).count == 2


def test_scored_mean_time_approaches_recent_scores() -> None:
    state = ScorerCount(8)
    for seconds in [1.0] + [0.1] * 60:
        state = scored(state, seconds)
    assert 0.1 < state.seconds < 0.11


@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 5), st.floats(0, 30)), max_size=50),
)
def test_queued_count_is_between_one_and_limit(
    most: int, moments: list[tuple[int, float, float]]
) -> None:
    state, now = ScorerCount(most), 0.0
    for waiting, seconds, later in moments:
        now += later
        state = queued(scored(state, seconds), waiting, now)
        assert 1 <= state.count <= most
