"""Implements `schedule.concurrency: auto`: a feedback loop that adjusts N' to maximize throughput.

All functions are pure: they take a state and return a new state.

The loop maximizes the rate of trained tokens: the response tokens of batches, divided by the time
between the moments at which the trainer took the batches. This rate reflects prefill of resumed and
preempted requests, dropped trajectories, idle engines, and an idle or busy trainer, so none of them
needs a model. The rate of arriving tokens would mislead, because a larger N' first fills the
buffer. Among values of N' with the same rate, the smallest is best: more requests in flight cause
more lag and more recomputation.

The loop starts with as many requests as the KV cache has room for at their expected length, at most
`START_BATCHES` batches. It then doubles N' while that pays, tries both sides in steps of sqrt(2),
stays at the best N' for a while, and tries again, because lengths change while a policy learns. The
first round has short windows, because the values that it compares differ much.

Invariants
- N' stays between the floor and the cap.
- N' is measured in a *window*. First, `SETTLING_TURNOVERS` turnovers pass without measurement. (A
  turnover is as many completions as the larger of the old and the new N'. Until then, short
  responses are over- or under-represented in batches.) Then at least `WINDOW_BATCHES` batches and a
  turnover are measured.
- A doubling must raise the rate by `GAIN_PER_DOUBLING`, a smaller step by its share of that. A step
  down may lower it by as much. Every rate is compared with the best known rate, so small losses do
  not add up.
- N' is not raised while requests stay free (because of back-pressure, a lag bound, or too few
  prompts), nor beyond the capacity of the KV cache. A storm of preemptions ends a window at once.
- More preemptions than `PREEMPTION_LIMIT` set a ceiling for N', which rises again slowly.
- Equal inputs give equal outputs: times come from events, never from a clock. Without times (all
  are zero), only the guards against preemptions change N'.

The constants are assumed.
"""

import math
from dataclasses import dataclass, replace

GAIN_PER_DOUBLING = 0.02
"""Relative gain in the rate of trained tokens that doubling N' must bring."""
START_BATCHES = 2
"""Number of batches whose requests limit the first N', however large the KV cache is.

Each further batch adds one step of lag.
"""
START_FILL = 0.9
"""Share of the KV cache that the first N' fills with requests of the expected length."""
SETTLING_TURNOVERS = (1, 2)
"""Number of turnovers after a change of N' that are not measured, in the first round and later."""
WINDOW_BATCHES = (3, 6)
"""Smallest number of batches in a window, in the first round and later."""
COARSE, FINE = 1.0, 0.5
"""Steps of N' in trials, as powers of two."""
MIN_STEP = 1.05
"""Smallest factor between N' and a trial; a trial that limits bring closer than this is skipped."""
REST_WINDOWS = 6
"""Number of windows at the best N' between two rounds of trials."""
MEMORY = 0.5
"""Weight of a new measurement of the best N' against the earlier ones."""
OVERCOMMIT = 1.25
"""Largest N' of a trial, as a multiple of the N' at which the KV cache would be full.

A value above 1 may pay: a request that an engine has queued starts as soon as another one ends.
"""
PREEMPTION_LIMIT = 1.0
"""Number of preemptions per completion above which N' is far beyond the KV capacity, whatever the
rate."""
SATURATED = 0.9
"""Share of N' that must have been in flight before a larger N' is tried."""
BACK_OFF = 0.93
"""Factor by which N' stays below a ceiling."""
CEILING_GROWTH = 1.05
"""Factor by which the ceiling rises at each round of trials."""


@dataclass(frozen=True, slots=True)
class Window:
    """Measurements under one value of N'.

    Attributes:
        settling: Number of completions that must pass before anything is measured.
        falling: Whether N' was lowered and still settles, so that load reports show the old N'.
        began_at: Time of the first batch after settling, in seconds; None before.
        began_tokens: Number of tokens in all batches up to that time.
        usage_sum: Sum of the reported shares of the KV caches in use.
        reports: Number of those load reports.
        busiest: Largest number of requests in flight at a completion.
    """

    settling: int
    falling: bool = False
    began_at: float | None = None
    began_tokens: int = 0
    batches: int = 0
    completions: int = 0
    preemptions: int = 0
    usage_sum: float = 0.0
    reports: int = 0
    busiest: int = 0

    @property
    def usage(self) -> float:
        """Mean share of the KV caches in use; 0 without reports."""
        return self.usage_sum / self.reports if self.reports else 0.0


@dataclass(frozen=True, slots=True)
class AutoConcurrency:
    """State of the feedback loop.

    Attributes:
        limit: The current N'.
        floor: Smallest N'.
        first: N' that a search starts with.
        batch: Number of requests of one batch.
        expected: Expected number of tokens of one request.
        cap: Largest number of requests that the engines run; None if unlimited.
        ceiling: Value of N' that caused too many preemptions; None if there was none.
        best: N' with the best known rate; 0 before the first measurement.
        best_rate: That rate, in trained tokens per second.
        step: The next trial, as a power of two relative to `best`.
        refused: Number of consecutive trials that did not pay.
        resting: Number of windows until the next round of trials.
        later: 0 in the first round, 1 after it.
    """

    limit: int
    floor: int
    first: int
    batch: int
    expected: int
    window: Window
    cap: int | None = None
    ceiling: float | None = None
    best: int = 0
    best_rate: float = 0.0
    step: float = COARSE
    refused: int = 0
    resting: int = 0
    later: int = 0


def start(groups_per_batch: int, group_size: int, expected_tokens: int) -> AutoConcurrency:
    """Return the state before any engine is up, with the number of requests of one batch as N', the
    largest number of requests in flight."""
    batch = groups_per_batch * group_size
    return AutoConcurrency(
        batch, group_size, batch, batch, expected_tokens, Window(SETTLING_TURNOVERS[0] * batch)
    )


def completed(state: AutoConcurrency, in_flight: int) -> AutoConcurrency:
    """Count a request whose response is complete; `in_flight` requests ran just before its end.

    Load reports could not replace this count, because short responses come and go between two
    reports.
    """
    window = state.window
    if window.settling:
        left = window.settling - 1
        falling = window.falling and left > 0
        return replace(state, window=replace(window, settling=left, falling=falling))
    busiest = max(window.busiest, in_flight)
    window = replace(window, completions=window.completions + 1, busiest=busiest)
    return replace(state, window=window)


def capped(state: AutoConcurrency, cap: int | None, kv_tokens: int) -> AutoConcurrency:
    """Start a new search, because engines came up or went down.

    The search starts at the current N' or, if nothing was measured yet, at the N' that fills the KV
    caches. Measurements with other engines are forgotten.

    Args:
        cap: Number of requests that the engines together run at most; None if unlimited.
        kv_tokens: Number of tokens that their KV caches have room for.
    """
    room = START_FILL * kv_tokens / state.expected
    first = round(min(START_BATCHES * state.batch, room)) if kv_tokens else state.batch
    limit = state.limit if state.best else first
    fresh = replace(
        state, first=first, cap=cap, ceiling=None, best=0, step=COARSE, refused=0, resting=0
    )
    return _at(replace(fresh, later=0), limit)


def loaded(state: AutoConcurrency, kv_usage: float, preemptions: int) -> AutoConcurrency:
    """Add the load report of one engine to the window; lower N' after a storm of preemptions."""
    window = state.window
    if preemptions >= max(1, state.limit // 2) and not window.falling:
        return _over(state)
    if window.settling:
        return state
    return replace(
        state,
        window=replace(
            window,
            preemptions=window.preemptions + preemptions,
            usage_sum=window.usage_sum + kv_usage,
            reports=window.reports + 1,
        ),
    )


def taken(state: AutoConcurrency, at_seconds: float, batched_tokens: int) -> AutoConcurrency:
    """Add a batch that the trainer took at `at_seconds` to the window; change N' if that completes
    it.

    `batched_tokens` is the number of tokens of all batches so far.
    """
    window = state.window
    if window.settling:
        return state
    if window.began_at is None:
        began = replace(window, began_at=at_seconds, began_tokens=batched_tokens)
        return replace(state, window=began)
    seconds = at_seconds - window.began_at
    window = replace(window, batches=window.batches + 1)
    state = replace(state, window=window)
    turned_over = 0 < window.busiest <= window.completions
    enough = turned_over and window.batches >= WINDOW_BATCHES[state.later]
    if not enough or not window.reports or seconds <= 0:
        return state
    if window.preemptions > PREEMPTION_LIMIT * window.completions:
        return _over(state)
    return _measured(state, (batched_tokens - window.began_tokens) / seconds)


# ---------------------------------------------------------------- decisions


def _measured(state: AutoConcurrency, rate: float) -> AutoConcurrency:
    """Compare the `rate` of a complete window with the best one, and choose the next N'."""
    if not state.best:
        return _trial(replace(state, best=state.limit, best_rate=rate))
    if state.limit == state.best:
        rate = MEMORY * rate + (1 - MEMORY) * state.best_rate
        state = replace(state, best_rate=rate, resting=max(0, state.resting - 1))
        return _at(state, state.limit) if state.resting else _trial(state)
    step = math.log2(state.limit / state.best)
    if rate < state.best_rate * (1 + GAIN_PER_DOUBLING * step):
        return _trial(_refuse(state))
    rate = rate if step > 0 else max(rate, state.best_rate)
    state = replace(state, best=state.limit, best_rate=rate, refused=0)
    # The other side of a fine step is the N' from which the step started, and is already measured.
    return _trial(replace(state, refused=1) if abs(state.step) == FINE else state)


def _refuse(state: AutoConcurrency) -> AutoConcurrency:
    """Reject a trial that does not pay: try a smaller step next, then the other side, then rest."""
    if abs(state.step) == COARSE:
        return replace(state, step=FINE)
    return replace(state, step=-state.step, refused=state.refused + 1)


def _trial(state: AutoConcurrency) -> AutoConcurrency:
    """Start a window at the next N' to try; if both sides were rejected, rest at the best N'."""
    while state.refused < 2:
        wanted = _reachable(state, state.best * 2.0**state.step)
        factor = wanted / state.best
        if factor >= MIN_STEP or factor <= 1 / MIN_STEP:
            return _at(state, wanted)
        state = _refuse(state)
    ceiling = None if state.ceiling is None else state.ceiling * CEILING_GROWTH
    state = replace(state, ceiling=ceiling, step=FINE, refused=0, resting=REST_WINDOWS, later=1)
    return _at(state, state.best)


def _reachable(state: AutoConcurrency, wanted: float) -> float:
    """Return the N' nearest to `wanted` that all limits allow; above `best` only if requests were
    used up."""
    window = state.window
    if wanted > state.best:
        if window.busiest < SATURATED * state.limit:
            return state.best
        if window.usage:
            wanted = min(wanted, state.limit * OVERCOMMIT / window.usage)
        if state.ceiling is not None:
            wanted = min(wanted, BACK_OFF * state.ceiling)
        wanted = max(wanted, state.best)
    return _clamp(state, wanted)


def _over(state: AutoConcurrency) -> AutoConcurrency:
    """Return to the best N', or below it, after too many preemptions."""
    lower = math.floor(BACK_OFF * state.limit)
    state = replace(state, ceiling=float(state.limit), refused=0, step=-FINE)
    if state.best and state.best < state.limit:
        return _at(replace(state, resting=REST_WINDOWS), state.best)
    return _at(replace(state, best=0), lower)


def _at(state: AutoConcurrency, wanted: float) -> AutoConcurrency:
    """Start a new window with N' = `wanted`, within the limits."""
    limit, before = _clamp(state, wanted), state.limit
    if limit == before:
        left = state.window
        return replace(state, window=Window(left.settling, left.falling))
    settling = SETTLING_TURNOVERS[state.later] * max(limit, before)
    return replace(state, limit=limit, window=Window(settling, limit < before))


def _clamp(state: AutoConcurrency, wanted: float) -> int:
    low = state.floor if state.cap is None else min(state.floor, state.cap)
    limit = max(low, round(wanted))
    return limit if state.cap is None else min(limit, max(1, state.cap))
