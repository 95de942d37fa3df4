"""`concurrency: auto` against a toy engine: throughput near that of the best fixed N'.

The toy has the shape that matters: decoding gets cheaper per token with the batch until the KV of
the running requests no longer fits; what is over is preempted and its context recomputed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

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


def throughput(fixed: int | None, seed: int = 1, steps: int = 5000) -> float:
    """Useful tokens a second over the second half of the run."""
    engine = Engine(seed)
    state = auto.start(groups_per_batch=4, group_size=4)
    reported = completed = 0
    mark = (0, 0.0)
    for step in range(steps):
        engine.fill(state.limit if fixed is None else fixed)
        engine.step()
        for _ in range(engine.completions - completed):
            state = auto.completed(state)
        completed = engine.completions
        if step % 20 == 0:
            usage = engine.kv / CAPACITY
            state = auto.loaded(state, usage, engine.preemptions - reported, len(engine.requests))
            reported = engine.preemptions
        if step == steps // 2:
            mark = (engine.tokens, engine.seconds)
    return (engine.tokens - mark[0]) / (engine.seconds - mark[1])


@pytest.mark.slow
def test_reaches_95_percent_of_the_best_fixed_concurrency() -> None:
    sweep = {n: throughput(n) for n in (32, 64, 128, 256, 512)}
    best = max(sweep, key=lambda n: sweep[n])
    assert 32 < best < 512, "the toy must have its best inside the sweep"
    assert throughput(None) >= 0.95 * sweep[best]


def report(state: auto.AutoConcurrency, usage: float, preemptions: int = 0) -> auto.AutoConcurrency:
    """A load report after a whole turnover with all slots used."""
    for _ in range(state.limit):
        state = auto.completed(state)
    return auto.loaded(state, usage, preemptions, state.limit)


def test_low_usage_raises_the_limit_only_after_a_turnover() -> None:
    state = auto.start(4, 4)
    for _ in range(15):
        state = auto.loaded(auto.completed(state), 0.1, 0, 16)
    assert state.limit == 16
    assert auto.loaded(auto.completed(state), 0.1, 0, 16).limit == 32  # twofold at most


def test_near_the_target_it_goes_half_the_way() -> None:
    assert report(auto.start(25, 4), 0.80).limit == 107


def test_usage_of_idle_slots_says_nothing() -> None:
    state = auto.start(4, 4)
    for _ in range(16):
        state = auto.completed(state)
    assert auto.loaded(state, 0.1, 0, in_flight=3).limit == 16


def test_preemptions_lower_it_and_are_remembered() -> None:
    state = report(auto.start(16, 8), 0.92, preemptions=20)
    assert state.limit == 119
    assert report(state, 0.5).limit < 128


def test_a_storm_is_not_waited_for() -> None:
    assert auto.loaded(auto.start(16, 8), 1.0, 64, 128).limit == 119


def test_within_the_dead_band_it_rests() -> None:
    assert report(auto.start(4, 4), 0.92).limit == 16


def test_too_large_an_off_policy_share_lowers_it() -> None:
    state = auto.start(16, 8)
    assert auto.batched(state, 0.6, 0.5).limit == 119
    assert auto.batched(state, 0.6, 1.0) == state


def test_it_stays_between_one_group_and_what_engines_run() -> None:
    state = auto.capped(auto.start(4, 4), 10)
    assert state.limit == 10
    for _ in range(50):
        state = report(state, 1.0, preemptions=100)
    assert state.limit == 4


def test_the_scheduler_uses_it() -> None:
    run = Script("pipeline", concurrency="auto")
    assert run.told == [ev.RequestPrompts(2)]  # one batch's worth at first
    run.prompts(2)
    assert run.scheduler.view().concurrency == 4
    run.finish(0, 1)
    run.prompts(1)
    run.finish(10, 11)
    run.prompts(1)
    run.tell(ev.EngineLoad("a", 0.2, 0))
    assert run.scheduler.view().concurrency == 8
    assert run.of(ev.RequestPrompts) == [ev.RequestPrompts(2)]
