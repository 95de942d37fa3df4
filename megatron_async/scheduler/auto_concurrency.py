"""`concurrency: auto`: a closed loop that finds N' by what it yields, as pure functions of a state.

What is maximized is the rate of trained tokens: the response tokens of batches over the time
between the moments at which the trainer took them. Prefill of resumed and preempted requests,
dropped trajectories, idle engines and an idle or a busy trainer all show in it, so none of them
needs a model. (Tokens as they arrive would mislead: a larger N' first fills the buffer.) Among
values of N' that yield the same, the smallest is wanted: more requests in flight mean more lag and
more recomputation.

The start is feed-forward: as many requests as the KV cache holds at their expected length, at most
`START_BATCHES`. From there the loop tries: N' is doubled while that pays, then both sides are
tried in steps of sqrt(2), then it rests for a while at the best and tries again (lengths change
while a policy learns). The first round has short windows: what it compares differs much.

Invariants
- N' stays within [floor, cap].
- N' is measured by a *window*: first `SETTLING_TURNOVERS` turnovers are let pass (a turnover: as
  many completions as the larger of the old and the new N'; until then short responses are over- or
  under-represented in batches), then at least `WINDOW_BATCHES` batches and a turnover are measured.
- A doubling must pay `GAIN_PER_DOUBLING`, a smaller step its share of that; going down may cost as
  much. Nothing is compared but with the best that is known, so small losses do not add up.
- No trial goes up while slots stay empty (a full ring, a lag bound, too few prompts), or further
  than the KV cache allows; a storm of preemptions ends a window at once.
- Preemptions above `PREEMPTION_LIMIT` are a ceiling for N', which relaxes slowly.
- Equal inputs give equal outputs: times come from the events, never from a clock. Without times
  (all zero) N' is never changed but by the guards.
The constants are assumed.
"""

import math
from dataclasses import dataclass, replace

GAIN_PER_DOUBLING = 0.02
"""What doubling N' must add to the rate of trained tokens."""
START_BATCHES = 2
"""Batches' worth of requests that the start does not exceed, however large the KV cache: each more
is a step of lag more."""
START_FILL = 0.9
"""Share of the KV cache that the start would fill with requests of the expected length."""
SETTLING_TURNOVERS = (1, 2)
"""Turnovers after a change of N' that are not measured, in the first round and later."""
WINDOW_BATCHES = (3, 6)
"""Batches that a window spans at least, in the first round and later."""
COARSE, FINE = 1.0, 0.5
"""Steps of trials in powers of two."""
LEAST_STEP = 1.05
"""A trial that limits shrink below this factor is not worth a window."""
REST_WINDOWS = 6
"""Windows between two rounds of trials."""
MEMORY = 0.5
"""Weight of a new measurement of the best N' against the older ones."""
OVERCOMMIT = 1.25
"""No trial goes beyond this much of the N' at which the KV cache would be full. (Some over it may
pay: a request that an engine has queued takes the room of another as soon as that ends.)"""
PREEMPTION_LIMIT = 1.0
"""Preemptions per completion above which N' is far over the KV capacity, whatever the rate."""
SATURATED = 0.9
"""Share of N' that must have been in flight for more of it to be of use."""
BACK_OFF = 0.93
"""Factor at a ceiling."""
CEILING_GROWTH = 1.05
"""Relaxation of the remembered ceiling at each round of trials."""


@dataclass(frozen=True, slots=True)
class Window:
    """Measurements under one N'.

    `settling`: completions still to pass before anything is measured; `falling`: that is because
    N' was lowered, so that even the guards see what is past. `began_at` is None until the first
    batch after that. `busiest`: the most requests in flight at a completion.
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
        """Mean KV usage; 0 when nothing was reported."""
        return self.usage_sum / self.reports if self.reports else 0.0


@dataclass(frozen=True, slots=True)
class AutoConcurrency:
    """State of the loop. `limit` is N', `first` what it begins with.

    `batch` is a batch's worth of requests, `expected` the tokens of one request. `best` is the N'
    with the best known rate, 0 before the first measurement; `step` the next trial from there in
    powers of two; `refused` the trials in a row that did not pay; `resting` the windows until the
    next round; `later` is 1 once the first round is over.
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
    """Return the state before engines are there: requests of one batch, never below one group."""
    batch = groups_per_batch * group_size
    return AutoConcurrency(
        batch, group_size, batch, batch, expected_tokens, Window(SETTLING_TURNOVERS[0] * batch)
    )


def completed(state: AutoConcurrency, in_flight: int) -> AutoConcurrency:
    """Count a request that ran to its end; `in_flight` were under way just before it.

    Load reports would not do for that: between two of them short responses come and go unseen.
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
    """Engines came or went; `cap` is what they run together, None = no limit known.

    Together they hold `kv_tokens`. What was measured with other engines does not count any more: a
    search begins, from here or, if nothing was measured, from what the KV cache should hold.
    """
    room = START_FILL * kv_tokens / state.expected
    first = round(min(START_BATCHES * state.batch, room)) if kv_tokens else state.batch
    limit = state.limit if state.best else first
    fresh = replace(
        state, first=first, cap=cap, ceiling=None, best=0, step=COARSE, refused=0, resting=0
    )
    return _at(replace(fresh, later=0), limit)


def loaded(state: AutoConcurrency, kv_usage: float, preemptions: int) -> AutoConcurrency:
    """A load report of one engine."""
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
    """The trainer took a batch at this time; `batched_tokens` is what all so far have held."""
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
    """A window under the present N' is complete."""
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
    # A fine step has measured the side that it came from.
    return _trial(replace(state, refused=1) if abs(state.step) == FINE else state)


def _refuse(state: AutoConcurrency) -> AutoConcurrency:
    """The trial does not pay: a smaller one, then the other side, then a rest."""
    if abs(state.step) == COARSE:
        return replace(state, step=FINE)
    return replace(state, step=-state.step, refused=state.refused + 1)


def _trial(state: AutoConcurrency) -> AutoConcurrency:
    """The next N' to try, or a rest at the best one when both sides were refused."""
    while state.refused < 2:
        wanted = _reachable(state, state.best * 2.0**state.step)
        factor = wanted / state.best
        if factor >= LEAST_STEP or factor <= 1 / LEAST_STEP:
            return _at(state, wanted)
        state = _refuse(state)
    ceiling = None if state.ceiling is None else state.ceiling * CEILING_GROWTH
    state = replace(state, ceiling=ceiling, step=FINE, refused=0, resting=REST_WINDOWS, later=1)
    return _at(state, state.best)


def _reachable(state: AutoConcurrency, wanted: float) -> float:
    """`wanted` within all limits; upwards only if the slots there are have been used."""
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
    """A new window under N' = `wanted`."""
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
