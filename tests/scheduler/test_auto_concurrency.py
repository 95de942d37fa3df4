"""`concurrency: auto`: what makes it move, and its throughput on a toy engine.

The toy has the shape that matters: decoding gets cheaper per token with the batch until the KV of
the running requests no longer fits; what is over is preempted and its context recomputed. The
same in the simulator, with every schedule's own costs: tests/simulate/test_auto_concurrency.py.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest

from megatron_async.scheduler import auto_concurrency as auto
from megatron_async.scheduler import events as ev
from tests.scheduler.script import Script

CAPACITY = 40_000
PROMPT = 50
STEP_SECONDS = 0.02
SECONDS_PER_REQUEST = 0.0001
PREFILL_SECONDS_PER_TOKEN = 0.00005


@dataclass
class Request:
    length: int
    done: int = 0
    resident: bool = False


class Engine:
    """Continuous batching, oldest first; the newest resident is preempted when KV is full."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.requests: list[Request] = []
        self.seconds = 0.0
        self.tokens = 0
        self.completions = 0
        self.finished_tokens = 0
        self.preemptions = 0

    def fill(self, limit: int) -> None:
        while len(self.requests) < limit:
            self.requests.append(Request(int(min(2000, self.random.lognormvariate(5.3, 0.8))) + 1))

    @property
    def kv(self) -> int:
        return sum(PROMPT + r.done for r in self.requests if r.resident)

    def step(self) -> None:
        """One decode step of everything that fits."""
        used = self.kv
        for request in self.requests:
            need = PROMPT + request.done
            if not request.resident and used + need + 10 * len(self.requests) <= CAPACITY:
                request.resident = True
                used += need
                self.seconds += need * PREFILL_SECONDS_PER_TOKEN
        running = [r for r in self.requests if r.resident]
        while used + len(running) > CAPACITY:
            victim = running.pop()
            victim.resident = False
            used -= PROMPT + victim.done
            self.preemptions += 1
        for request in running:
            request.done += 1
        self.seconds += STEP_SECONDS + SECONDS_PER_REQUEST * len(running)
        self.tokens += len(running)
        before = len(self.requests)
        self.requests = [r for r in self.requests if r.done < r.length]
        self.completions += before - len(self.requests)
        self.finished_tokens += sum(r.done for r in running if r.done >= r.length)


def throughput(fixed: int | None, seed: int = 1, steps: int = 10_000) -> float:
    """Useful tokens a second over the second half of the run; a batch is 16 completions."""
    engine = Engine(seed)
    state = auto.start(groups_per_batch=4, group_size=4, expected_tokens=100)
    reported = completed = 0
    mark = (0, 0.0)
    for step in range(steps):
        engine.fill(state.limit if fixed is None else fixed)
        engine.step()
        for _ in range(engine.completions - completed):
            completed += 1
            state = auto.completed(state, state.limit if fixed is None else fixed)
            if completed % 16 == 0:
                state = auto.taken(state, engine.seconds, engine.finished_tokens)
        if step % 20 == 0:
            usage = engine.kv / CAPACITY
            state = auto.loaded(state, usage, engine.preemptions - reported)
            reported = engine.preemptions
        if step == steps // 2:
            mark = (engine.tokens, engine.seconds)
    return (engine.tokens - mark[0]) / (engine.seconds - mark[1])


@pytest.mark.slow
@pytest.mark.one_core
def test_reaches_95_percent_of_the_best_fixed_concurrency() -> None:
    sweep = {n: throughput(n) for n in (32, 64, 128, 256, 512)}
    best = max(sweep, key=lambda n: sweep[n])
    assert 32 < best < 512, "the toy must have its best inside the sweep"
    assert throughput(None) >= 0.95 * sweep[best]


class Loop:
    """An `auto` loop that gets windows: one call is a settled, complete window at a rate."""

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
        """One window in which tokens come at `rate`; the N' that follows from it."""
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
def test_it_begins_with_what_the_cache_holds_of_expected_requests(
    kv_tokens: int, first: int
) -> None:
    state = auto.capped(auto.start(4, 4, 100), None, kv_tokens)
    assert state.limit == first


def test_it_begins_with_one_batch_and_doubles_while_that_pays() -> None:
    loop = Loop()
    assert loop.state.limit == 16
    assert [loop.window(rate) for rate in (1000, 1500, 1900)] == [32, 64, 128]


def test_a_doubling_that_does_not_pay_is_taken_back_and_both_sides_are_tried() -> None:
    loop = Loop()
    loop.window(1000)
    loop.window(1500)
    assert loop.window(1505) == 45  # 64 was no better than 32: up by sqrt(2) only
    assert loop.window(1505) == 23  # nor was that: down
    assert loop.window(1400) == 32  # that costs: rest at the best
    assert loop.state.resting == auto.REST_WINDOWS


def test_of_equally_good_values_it_takes_the_smallest() -> None:
    loop = Loop()
    loop.window(1000)
    loop.window(1500)
    loop.window(1500)
    loop.window(1500)
    assert loop.window(1499) == 16  # 23 is as good as 32, so lower still
    assert loop.window(1000) == 23  # 32 is known already: rest
    assert loop.state.resting == auto.REST_WINDOWS


def test_small_losses_do_not_add_up() -> None:
    loop = Loop(64, 4)
    loop.state = replace(loop.state, best=256, best_rate=1000.0, step=-auto.FINE, refused=1)
    loop.state = replace(loop.state, limit=181)
    assert loop.window(993) == 128
    assert loop.window(985) == 181  # 0.8 % below the last, but 1.5 % below the best known
    assert loop.state.best == 181


def test_it_tries_again_after_a_rest() -> None:
    loop = Loop()
    for rate in (1000, 1500, 1500, 1500, 1400):
        loop.window(rate)
    seen = [loop.window(1500) for _ in range(auto.REST_WINDOWS)]
    assert seen == [32] * (auto.REST_WINDOWS - 1) + [45]


def test_nothing_is_compared_before_a_turnover_and_a_window_of_batches() -> None:
    state = auto.start(4, 4, 100)
    for _ in range(15):
        state = auto.completed(state, 16)
    assert auto.taken(state, 5.0, 100) == state
    state = auto.completed(state, 16)
    for batch in range(auto.WINDOW_BATCHES[0] + 1):
        state = auto.taken(auto.loaded(state, 0.1, 0), float(batch), 100 * batch)
    assert (state.best, state.limit) == (0, 16)
    for _ in range(16):
        state = auto.completed(state, 16)
    assert auto.taken(state, 9.0, 900).limit == 32


def test_without_times_it_never_tries() -> None:
    state = auto.start(4, 4, 100)
    for batch in range(50):
        for _ in range(16):
            state = auto.completed(state, 16)
        state = auto.taken(auto.loaded(state, 0.1, 0), 0.0, 100 * batch)
    assert state.limit == 16


def test_no_trial_goes_up_while_slots_stay_empty() -> None:
    """A full ring, a lag bound, too few prompts: more slots would be empty too."""
    assert Loop().window(1000, in_flight=12) == 11


def test_responses_shorter_than_a_report_interval_do_not_look_like_empty_slots() -> None:
    """Each report finds the engine empty: all that ran has ended, and what follows comes then."""
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


def test_no_trial_goes_far_beyond_the_cache() -> None:
    assert Loop(16, 8).window(1000, usage=0.8) == 200  # it would be full at 160
    assert Loop(16, 8).window(1000, usage=1.0) == 160


def test_preemptions_are_a_ceiling_that_is_remembered() -> None:
    loop = Loop(16, 8)
    assert loop.window(1000) == 256
    assert loop.window(1500, preemptions=100, reports=3) == 128  # a faster window, but a storm
    assert loop.state.ceiling == 256
    for _ in range(auto.REST_WINDOWS):
        loop.window(1000)
    assert loop.window(1000) < 256


def test_a_storm_is_not_waited_for() -> None:
    assert auto.loaded(auto.start(16, 8, 100), 1.0, 64).limit == 119


def test_the_end_of_a_storm_is_not_taken_for_another_one() -> None:
    state = auto.loaded(auto.start(16, 8, 100), 1.0, 64)
    assert auto.loaded(state, 1.0, 64) == state


def test_it_stays_between_one_group_and_what_engines_run() -> None:
    state = auto.capped(auto.start(4, 4, 100), 10, 0)
    assert state.limit == 10
    for _ in range(50):
        for _ in range(20):
            state = auto.completed(state, 16)
        state = auto.loaded(state, 1.0, 100)
    assert state.limit == 4


def test_other_engines_start_the_search_again() -> None:
    loop = Loop()
    loop.window(1000)
    loop.window(1500)
    state = auto.capped(loop.state, 40, 0)
    assert (state.limit, state.best) == (40, 0)


def test_the_scheduler_uses_it() -> None:
    run = Script("pipeline", concurrency="auto", expected_tokens=2250)
    assert run.emitted == [ev.RequestPrompts(2)]  # the cache holds four such requests
    run.prompts(4)
    seen = []
    for step in range(4):
        run.send(ev.EngineLoad("a", 0.2, 0))
        run.finish(*run.running[:4])
        run.prompts(4)
        run.send(ev.BatchTaken(step, 1.0 + step), ev.UpdateRequested(step + 1))
        run.publish(step + 1)
        seen.append(run.scheduler.view().concurrency)
    assert seen == [4, 4, 4, 8]
    assert len(run.running) == 8
