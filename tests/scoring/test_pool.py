"""How many scorers run, and a pool of stand-in workers that follows: the test moves the clock."""

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
    """Scores when it may, and reports so many seconds for each; the text is the reward."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.may = asyncio.Event()
        self.busy = 0
        self.held: list[int] = []
        self.retired = False

    async def start(self) -> list[bool]:
        return [False]

    async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        self.busy += 1
        assert self.busy == 1, "two calls at once"
        self.held.append(len(work))
        await self.may.wait()
        self.busy -= 1
        texts = [text for piece in work for text in piece.texts]
        if "9" in texts:
            raise RuntimeError("the worker is gone")
        return [[ResponseScore(float(text), {}, self.seconds)] for text in texts]

    def retire(self) -> None:
        assert not self.busy
        self.retired = True


class Pool:
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
        """So many at once; no worker answers before all have come."""
        for worker in self.all:
            worker.may.clear()
        tasks = [self.score(str(i % 9)) for i in range(count)]
        for _ in range(4):
            await asyncio.sleep(0)
        for worker in self.all:
            worker.may.set()
        return [reward for reward, _ in await asyncio.gather(*tasks)]


def test_it_starts_with_one_and_grows_to_the_limit_when_scores_take_long(tmp_path: Path) -> None:
    async def body() -> None:
        pool = Pool(tmp_path, 4)
        assert len(pool.all) == 1
        assert await pool.burst(1) == [0.0]
        assert len(pool.pool.workers) == 1, "one response needs one scorer"
        assert await pool.burst(8) == [float(i) for i in range(8)], "each gets its own reward"
        assert len(pool.pool.workers) == 4
        assert all(held == 1 for worker in pool.all for held in worker.held)

    asyncio.run(body())


def test_quick_scores_travel_together(tmp_path: Path) -> None:
    async def body() -> None:
        pool = Pool(tmp_path, 4, seconds=0.001)
        await pool.burst(1)
        assert await pool.burst(100) == [float(i % 9) for i in range(100)]
        assert len(pool.pool.workers) == 1
        assert pool.all[0].held == [1, 1, 50, 49]

    asyncio.run(body())


def test_idle_workers_are_retired_after_a_rest_and_busy_ones_never(tmp_path: Path) -> None:
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


def test_a_worker_that_fails_is_given_back(tmp_path: Path) -> None:
    async def body() -> None:
        pool = Pool(tmp_path, 1)
        pool.all[0].may.set()
        with pytest.raises(RuntimeError, match="gone"):
            await pool.score("9")
        assert (await pool.score("3"))[0] == 3.0

    asyncio.run(body())


def test_a_reward_gets_special_tokens_but_not_the_end_of_a_response(tmp_path: Path) -> None:
    async def texts(**task: bool) -> list[str]:
        seen = []

        class Reads(Worker):
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
    return ScorerCount(most, count=count, seconds=seconds)


def test_a_queue_that_one_scorer_works_off_in_time_asks_for_no_more() -> None:
    assert queued(at(8, 0.001), 100, 0.0).count == 1


def test_a_longer_queue_asks_for_as_many_as_work_it_off_in_time() -> None:
    assert queued(at(64, DRAIN_SECONDS / 10), 200, 0.0).count == 20


def test_what_a_burst_asked_for_is_kept_for_a_while_and_then_given_up() -> None:
    state = queued(at(8, 1.0), 8, 1.0)
    for second in range(2, int(REST_SECONDS)):
        state = queued(state, 0, float(second))
        assert state.count == 8
    state = queued(state, 0, REST_SECONDS)  # the burst was within the span that ends here
    assert state.count == 8
    assert queued(state, 2, 2 * REST_SECONDS).count == 2


def test_the_time_of_a_score_is_a_mean_that_forgets() -> None:
    state = ScorerCount(8)
    for seconds in [1.0] + [0.1] * 60:
        state = scored(state, seconds)
    assert 0.1 < state.seconds < 0.11


@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 5), st.floats(0, 30)), max_size=50),
)
def test_the_number_stays_within_one_and_the_limit(
    most: int, moments: list[tuple[int, float, float]]
) -> None:
    state, now = ScorerCount(most), 0.0
    for waiting, seconds, later in moments:
        now += later
        state = queued(scored(state, seconds), waiting, now)
        assert 1 <= state.count <= most
