"""Implements `schedule.concurrency: auto`: a feedback loop that adjusts N', the largest number of
requests in flight, to maximize throughput.

All functions are pure: they take a state and return a new state.

The loop maximizes the rate of trained tokens: the response tokens of batches, divided by the time
between the moments at which the trainer took the batches. This rate includes the cost of everything
that N' influences: repeated prefill of resumed and preempted requests, dropped trajectories, idle
engines, and an idle or busy trainer. The rate at which tokens arrive from engines would mislead,
because a larger N' first fills the buffer of partial trajectories with tokens that no batch
contains yet. Among values of N' with the same rate, the smallest is best: more requests in flight
cause more lag and more recomputation.

The loop starts with as many requests as fill the share `START_FILL` of the KV caches at their
expected length, but at most with the requests of `START_BATCHES` batches. It then doubles N' as
long as the rate rises enough. After that it tries the best N' times sqrt(2) and divided by sqrt(2);
if one of them is better, it continues in this direction. Then it stays at the best N' for
`REST_WINDOWS` windows and repeats the trials with sqrt(2), because lengths change while a policy
learns. The trials until the first rest are the first round. Its windows are short, because the
values of N' that it compares, and so their rates, differ much.

Invariants
- N' stays between the size of a group (the floor) and the number of requests that the engines can
  run at once (the cap).
- N' is measured in a *window*. A turnover is the time in which as many requests are completed as
  the larger of the old and the new N'. After a change of N', short responses are over- or
  under-represented in batches for a turnover, so `SETTLING_TURNOVERS` turnovers pass without
  measurement. Then at least `WINDOW_BATCHES` batches are measured, and at least as many completed
  requests as the largest number of requests in flight.
- A doubled N' is kept only if it raises the rate by at least the share `GAIN_PER_DOUBLING`. A
  smaller factor must raise it in proportion to its logarithm (sqrt(2): by at least half of that),
  and a step down may lower it by at most as much. Every rate is compared with the best known rate,
  so that small losses do not add up over several steps.
- N' is not raised if fewer than the share `SATURATED` of N' requests were in flight, because of
  back-pressure, a lag bound or too few prompts. It is not raised above `OVERCOMMIT` times the
  number of requests with which the KV caches would be full. If a single load report of an engine
  has N' / 2 preemptions or more, the window ends and N' is lowered immediately.
- If such a report ends a window, or a window has more than `PREEMPTION_LIMIT` preemptions per
  completed request, its N' becomes a ceiling that later values stay below. The ceiling rises by the
  factor `CEILING_GROWTH` after each round of trials.
- Equal inputs give equal outputs: times come from events, never from a clock. If the events have no
  times (all are 0), no rate can be computed. Then N' changes only if a single load report has too
  many preemptions, or if engines come up or go down.

The values of the constants are assumptions, not measurements.
"""

import math
from dataclasses import dataclass, replace

GAIN_PER_DOUBLING = 0.02
"""Smallest relative gain in the rate of trained tokens for which a doubling of N' is kept. N' is
the largest number of requests in flight."""
START_BATCHES = 2
"""The first N' (largest number of requests in flight) is at most the number of requests of this
many batches, however large the KV caches are.

The limit exists because every batch of requests beyond the first adds one step of lag.
"""
START_FILL = 0.9
"""Share of the KV caches that the first N' requests fill if each has the expected length."""
SETTLING_TURNOVERS = (1, 2)
"""Number of turnovers after a change of N' during which nothing is measured: in the first round of
trials, and in later rounds. In a turnover, as many requests are completed as the larger of the old
and the new N'."""
WINDOW_BATCHES = (3, 6)
"""Smallest number of batches over which the rate for one N' is measured: in the first round of
trials, and in later rounds."""
COARSE, FINE = 1.0, 0.5
"""Steps between values of N' that are tried, as exponents of 2: 1.0 doubles N', and 0.5 multiplies
it by sqrt(2)."""
MIN_STEP = 1.05
"""Smallest factor between the best N' and an N' that is tried. If the limits on N' allow only a
smaller step, the trial is skipped."""
REST_WINDOWS = 6
"""Number of measurements at the best N' between two rounds in which other values are tried."""
MEMORY = 0.5
"""Weight of a new measurement of the rate at the best N'; the earlier rate has the weight 1 -
`MEMORY`."""
OVERCOMMIT = 1.25
"""Largest N' that is tried, divided by the number of requests with which the KV caches would be
full.

A value above 1 may pay, because a request that waits in an engine's queue starts as soon as another
request ends.
"""
PREEMPTION_LIMIT = 1.0
"""Number of preemptions per completed request above which N' is lowered, whatever the rate is: it
is then far more than fits into the KV caches."""
SATURATED = 0.9
"""A larger N' is tried only if at least this share of N' requests was in flight at some time.
Otherwise N' does not limit the throughput."""
BACK_OFF = 0.93
"""Largest N' that may be tried, divided by the ceiling. The ceiling is an N' that caused too many
preemptions."""
CEILING_GROWTH = 1.05
"""Factor by which the ceiling, an N' that caused too many preemptions, rises with each round of
trials, because lengths of responses change."""


@dataclass(frozen=True, slots=True)
class Window:
    """Measurements while N', the largest number of requests in flight, has one value.

    Attributes:
        settling: Number of requests that must still be completed before anything is measured.
        falling: Whether N' was lowered and `settling` is not 0 yet. Load reports may then still be
            caused by the larger old N'.
        began_at: Time in seconds at which the trainer took the first batch after settling; None
            before that.
        began_tokens: Number of tokens in all batches up to `began_at`.
        batches: Number of batches that the trainer took after `began_at`.
        completions: Number of requests that were completed after settling.
        preemptions: Number of preemptions in load reports after settling.
        usage_sum: Sum, over these load reports, of the share of the KV cache in use.
        reports: Number of these load reports.
        busiest: Largest number of requests in flight when a request was completed.
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
        """Mean share of the KV caches in use, over the load reports of this window; 0 without
        reports."""
        return self.usage_sum / self.reports if self.reports else 0.0


@dataclass(frozen=True, slots=True)
class AutoConcurrency:
    """State of the feedback loop that adjusts N', the largest number of requests in flight.

    Attributes:
        limit: The current N'.
        floor: Smallest allowed N'.
        first: The N' with which a search starts if nothing was measured yet.
        batch: Number of requests of one batch.
        expected: Expected number of tokens of one request.
        window: Measurements at the current N'.
        cap: Largest number of requests that all engines together can run; None if unlimited.
        ceiling: An N' that caused too many preemptions; None if there was none.
        best: The N' with the best known rate of trained tokens; 0 before the first measurement.
        best_rate: Rate at `best`, in trained tokens per second.
        step: The N' to try next is `best` * 2 ** `step`.
        refused: Number of directions from `best` (up, down) that were tried with sqrt(2) and
            rejected, or need no trial; at 2 the round ends.
        resting: Number of further windows at `best` before other values are tried again.
        later: 0 in the first round of trials, 1 after it; an index into `SETTLING_TURNOVERS` and
            `WINDOW_BATCHES`.
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
    """Return the state before any engine is up. N', the largest number of requests in flight, is
    then the number of requests of one batch."""
    batch = groups_per_batch * group_size
    return AutoConcurrency(
        batch, group_size, batch, batch, expected_tokens, Window(SETTLING_TURNOVERS[0] * batch)
    )


def completed(state: AutoConcurrency, in_flight: int) -> AutoConcurrency:
    """Count a request whose response is complete.

    `in_flight` is the number of requests that ran just before its end. The numbers of running
    requests in the engines' load reports could not replace it, because short responses start and
    end between two reports.
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
    """Start a new search for the best N' (the largest number of requests in flight), because
    engines came up or went down.

    The search starts at the current N'. If nothing was measured yet, it starts at the N' that fills
    the share `START_FILL` of the KV caches, but at most at the requests of `START_BATCHES` batches.
    Rates and the ceiling that were found with other engines are forgotten.

    Args:
        cap: Largest number of requests that all engines together can run; None if unlimited.
        kv_tokens: Total capacity of the KV caches of all engines in tokens.
    """
    room = START_FILL * kv_tokens / state.expected
    first = round(min(START_BATCHES * state.batch, room)) if kv_tokens else state.batch
    limit = state.limit if state.best else first
    fresh = replace(
        state, first=first, cap=cap, ceiling=None, best=0, step=COARSE, refused=0, resting=0
    )
    return _at(replace(fresh, later=0), limit)


def loaded(state: AutoConcurrency, kv_usage: float, preemptions: int) -> AutoConcurrency:
    """Add the load report of one engine to the current window. If the report has N' / 2 preemptions
    or more, lower N' (the largest number of requests in flight) at once.

    N' is not lowered while the report may still be caused by a larger N' before
    (`Window.falling`).

    Args:
        kv_usage: Share of the engine's KV cache in use, 0 to 1.
        preemptions: Number of preemptions since the engine's last report.
    """
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
    """Add a batch that the trainer took at time `at_seconds` to the current window of measurements.

    If the window is complete, choose the next N', the largest number of requests in flight: by the
    window's rate of trained tokens, or lower if the window has too many preemptions.

    Args:
        batched_tokens: Number of tokens of all batches so far, including this one.
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
    """Compare `rate`, the trained tokens per second that were measured at the current N', with the
    best known rate, and choose the next N' (the largest number of requests in flight)."""
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
    # The next trial may go further in the same direction. The opposite direction need not be tried
    # after a fine step: it leads back to the N' from which the step started, which is measured.
    return _trial(replace(state, refused=1) if abs(state.step) == FINE else state)


def _refuse(state: AutoConcurrency) -> AutoConcurrency:
    """Reject the last tried N' (the largest number of requests in flight), because its rate of
    trained tokens is too low or the limits do not allow it. After a doubling, the next step is the
    factor sqrt(2); after a factor of sqrt(2), it is the opposite direction."""
    if abs(state.step) == COARSE:
        return replace(state, step=FINE)
    return replace(state, step=-state.step, refused=state.refused + 1)


def _trial(state: AutoConcurrency) -> AutoConcurrency:
    """Set N', the largest number of requests in flight, to the next value to try, and start to
    measure its rate of trained tokens. If neither a larger nor a smaller value is left to try,
    return to the best N' and keep it for `REST_WINDOWS` measurements."""
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
    """Return the value nearest to `wanted` that all limits allow for N', the largest number of
    requests in flight. The result is above the best known N' only if almost N' requests were in
    flight at some time since the current measurement began."""
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
    """Lower N', the largest number of requests in flight, after too many preemptions: to the best
    known N' if that is smaller, otherwise by the factor `BACK_OFF`. The old N' becomes the ceiling,
    which later values stay below."""
    lower = math.floor(BACK_OFF * state.limit)
    state = replace(state, ceiling=float(state.limit), refused=0, step=-FINE)
    if state.best and state.best < state.limit:
        return _at(replace(state, resting=REST_WINDOWS), state.best)
    return _at(replace(state, best=0), lower)


def _at(state: AutoConcurrency, wanted: float) -> AutoConcurrency:
    """Set N', the largest number of requests in flight, to `wanted` or to the nearest value that
    `floor` and `cap` allow, and start a new measurement."""
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
