"""Tests when `concurrency: auto` changes N', the limit of concurrent requests.

tests/simulate/test_auto_concurrency.py tests its throughput with the costs of every schedule.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_async.scheduler import auto_concurrency as auto
from megatron_async.scheduler import events as ev
from tests.scheduler.script import Script


class Loop:
    """Driver of an `auto` loop: complete windows, each after settling and at a chosen rate."""

    def __init__(self, groups: int = 4, size: int = 4) -> None:
        self.state = auto.start(groups, size, 100)
        self.seconds = 1.0
        self.tokens = 0

    def window(
        self,
        rate: float,
        *,
        usage: float = 0.1,
        preemptions: int = 0,
        reports: int = 1,
        in_flight: int | None = None,
    ) -> int:
        """Measure one window in which tokens are trained at `rate`; return the next N'."""
        in_flight = self.state.limit if in_flight is None else in_flight
        for _ in range(self.state.window.settling):
            self.state = auto.completed(self.state, in_flight)
        self._batch(0, 1.0)
        for _ in range(in_flight):
            self.state = auto.completed(self.state, in_flight)
        for _ in range(reports):
            self.state = auto.loaded(self.state, usage, preemptions)
        for _ in range(auto.WINDOW_BATCHES[self.state.later]):
            self._batch(rate, 1.0)
        return self.state.limit

    def _batch(self, rate: float, seconds: float) -> None:
        self.seconds += seconds
        self.tokens += int(rate * seconds)
        self.state = auto.taken(self.state, self.seconds, self.tokens)


@pytest.mark.parametrize(
    ("kv_tokens", "first"),
    [(1_000, 9), (2_000, 18), (1_000_000, 32), (100, 4)],
    ids=["what the cache holds", "more of it", "two batches at most", "one group at least"],
)
def test_auto_starts_with_as_many_requests_as_fit_into_the_kv_cache(
    kv_tokens: int, first: int
) -> None:
    state = auto.capped(auto.start(4, 4, 100), None, kv_tokens)
    assert state.limit == first


def test_auto_starts_with_one_batch_and_doubles_while_that_pays() -> None:
    loop = Loop()
    assert loop.state.limit == 16
    assert [loop.window(rate) for rate in (1000, 1500, 1900)] == [32, 64, 128]


def test_auto_reverts_a_doubling_that_does_not_pay_and_tries_both_sides() -> None:
    loop = Loop()
    loop.window(1000)
    loop.window(1500)
    # N' = 64 was not faster than 32, so the next trial is only sqrt(2) above 32.
    assert loop.window(1505) == 45
    assert loop.window(1505) == 23  # N' = 45 was not faster either, so the next trial is below 32.
    assert loop.window(1400) == 32  # N' = 23 is slower, so the loop stays at the best value.
    assert loop.state.resting == auto.REST_WINDOWS


def test_auto_does_not_accumulate_small_losses() -> None:
    loop = Loop(64, 4)
    loop.state = replace(loop.state, best=256, best_rate=1000.0, step=-auto.FINE, refused=1)
    loop.state = replace(loop.state, limit=181)
    assert loop.window(993) == 128
    # The rate is 0.8 % below the last rate, but 1.5 % below the best known rate.
    assert loop.window(985) == 181
    assert loop.state.best == 181


def test_auto_does_not_raise_concurrency_while_requests_stay_free() -> None:
    """With back-pressure, a lag bound or too few prompts, more requests would stay free too."""
    assert Loop().window(1000, in_flight=12) == 11


def test_auto_raises_concurrency_when_load_reports_miss_short_responses() -> None:
    """Every load report shows an idle engine: all requests have ended, and new ones start after
    it."""
    run = Script("pipeline", concurrency="auto", expected_tokens=2250)
    run.prompts(2)
    seen = []
    for step in range(4):
        run.finish(*run.running[:4])
        run.send(ev.EngineLoad("a", 0.0, 0))
        run.prompts(2)
        run.send(ev.BatchTaken(step, 1.0 + step), ev.UpdateRequested(step + 1))
        run.publish(step + 1)
        seen.append(run.scheduler.view().concurrency)
    assert seen == [4, 4, 4, 8]


def test_auto_trial_stays_near_the_capacity_of_the_kv_cache() -> None:
    assert Loop(16, 8).window(1000, usage=0.8) == 200  # The cache would be full at N' = 160.
    assert Loop(16, 8).window(1000, usage=1.0) == 160


def test_auto_remembers_a_ceiling_after_preemptions() -> None:
    loop = Loop(16, 8)
    assert loop.window(1000) == 256
    # The window is faster, but has a storm of preemptions.
    assert loop.window(1500, preemptions=100, reports=3) == 128
    assert loop.state.ceiling == 256
    for _ in range(auto.REST_WINDOWS):
        loop.window(1000)
    assert loop.window(1000) < 256


def test_auto_ends_window_at_once_in_a_storm_of_preemptions() -> None:
    assert auto.loaded(auto.start(16, 8, 100), 1.0, 64).limit == 119


def test_auto_stays_between_one_group_and_the_engines_request_limit() -> None:
    state = auto.capped(auto.start(4, 4, 100), 10, 0)
    assert state.limit == 10
    for _ in range(50):
        for _ in range(20):
            state = auto.completed(state, 16)
        state = auto.loaded(state, 1.0, 100)
    assert state.limit == 4


def test_auto_restarts_search_when_engines_change() -> None:
    loop = Loop()
    loop.window(1000)
    loop.window(1500)
    state = auto.capped(loop.state, 40, 0)
    assert (state.limit, state.best) == (40, 0)
