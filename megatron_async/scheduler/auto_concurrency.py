"""`concurrency: auto`: a closed loop that finds N', as pure functions of an immutable state.

The throughput of an engine grows with the requests in flight until their KV no longer fits; then
requests are preempted and recomputed. So N' is steered towards a high, not full, KV usage.

Invariants
- N' stays within [floor, cap].
- One change a turnover (as many completions as N'), judged by its second half only: before that,
  KV usage and preemptions still show the N' before it. A storm is not waited for.
- A preemption rate above `PREEMPTION_LIMIT` lowers N' and remembers where that was: N' then stays
  below that ceiling, which itself relaxes slowly (lengths change while a policy learns).
- An off-policy share above the limit lowers N' as well.
The constants are assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

TARGET_USAGE = 0.92
"""Mean KV usage that is aimed at."""
DEAD_BAND = 0.03
"""Distance from the target within which N' is left alone."""
LARGEST_STEP = 2.0
"""N' grows at most by this factor at once."""
GAIN = 0.5
"""Share of the way to the target that one change goes, once it is nearer than `NEAR`."""
NEAR = 0.25
PREEMPTION_LIMIT = 0.1
"""Preemptions per completion above which N' is over the KV capacity."""
SATURATED = 0.9
"""Share of N' that must be in flight for a usage report to count."""
BACK_OFF = 0.93
"""Factor at too many preemptions, or at too large an off-policy share."""
CEILING_GROWTH = 1.02
"""Relaxation of the remembered ceiling at each turnover."""


@dataclass(frozen=True, slots=True)
class AutoConcurrency:
    """State of the loop. `limit` is N'.

    `completions` since N' was last judged; preemptions and usage since half a turnover after that.
    """

    limit: int
    floor: int
    cap: int | None = None
    ceiling: float | None = None
    completions: int = 0
    preemptions: int = 0
    usage_sum: float = 0.0
    usage_reports: int = 0


def start(groups_per_batch: int, group_size: int) -> AutoConcurrency:
    """One batch's worth of requests to begin with; never below one group."""
    return AutoConcurrency(limit=groups_per_batch * group_size, floor=group_size)


def completed(state: AutoConcurrency) -> AutoConcurrency:
    """One more request ran to its end."""
    return replace(state, completions=state.completions + 1)


def capped(state: AutoConcurrency, cap: int | None) -> AutoConcurrency:
    """Engines came or went; `cap` is what they run together, None = no limit known."""
    state = replace(state, cap=cap)
    return replace(state, limit=_clamp(state, state.limit))


def loaded(
    state: AutoConcurrency, kv_usage: float, preemptions: int, in_flight: int
) -> AutoConcurrency:
    """A load report of one engine. Its usage speaks of N' only while nearly all slots are used."""
    if preemptions >= max(1, state.limit // 2):
        return _changed(state, BACK_OFF * state.limit, ceiling=float(state.limit))
    if 2 * state.completions < state.limit:
        return state
    state = replace(state, preemptions=state.preemptions + preemptions)
    if in_flight >= SATURATED * state.limit:
        state = replace(
            state,
            usage_sum=state.usage_sum + kv_usage,
            usage_reports=state.usage_reports + 1,
        )
    if state.completions < state.limit or not state.usage_sum:
        return state
    if state.preemptions > PREEMPTION_LIMIT * state.completions:
        return _changed(state, BACK_OFF * state.limit, ceiling=float(state.limit))
    return _steered(state, state.usage_sum / state.usage_reports)


def _steered(state: AutoConcurrency, usage: float) -> AutoConcurrency:
    """Towards the target usage, below the relaxed ceiling."""
    ceiling = None if state.ceiling is None else state.ceiling * CEILING_GROWTH
    if abs(usage - TARGET_USAGE) <= DEAD_BAND:
        return _changed(state, state.limit, ceiling)
    factor = min(TARGET_USAGE / usage, LARGEST_STEP)
    if abs(factor - 1) < NEAR:
        factor = 1 + GAIN * (factor - 1)
    wanted = state.limit * factor
    if factor > 1:
        wanted = max(wanted, state.limit + 1)
        if ceiling is not None:
            wanted = min(wanted, max(BACK_OFF * ceiling, state.limit))
    return _changed(state, wanted, ceiling)


def batched(state: AutoConcurrency, off_policy_share: float, limit: float) -> AutoConcurrency:
    """A batch was emitted with this share of off-policy tokens; `limit` 1 accepts any."""
    if limit >= 1 or off_policy_share <= limit:
        return state
    return _changed(state, BACK_OFF * state.limit, ceiling=float(state.limit))


def _changed(state: AutoConcurrency, wanted: float, ceiling: float | None) -> AutoConcurrency:
    return replace(
        state,
        limit=_clamp(state, wanted),
        ceiling=ceiling,
        completions=0,
        preemptions=0,
        usage_sum=0.0,
        usage_reports=0,
    )


def _clamp(state: AutoConcurrency, wanted: float) -> int:
    low = state.floor if state.cap is None else min(state.floor, state.cap)
    limit = max(low, int(wanted))
    return limit if state.cap is None else min(limit, max(1, state.cap))
