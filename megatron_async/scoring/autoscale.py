"""Computes the number of scorer processes that the queue needs, within `task.scorer_workers`.

If the running scorers would need longer than `DRAIN_SECONDS` to finish the queue, scorers are added
immediately, but never more than there are jobs to score. The number decreases only at the end of a
period of `REST_SECONDS`, to the largest number that was needed in the period, so that bursts do not
start and end processes all the time.

Invariants
- The number of scorers is between 1 and `most`.
- Equal inputs give equal numbers: times come from the caller (the monotonic clock in a real pool,
  the virtual clock in the simulator).
- The values of `DRAIN_SECONDS` and `REST_SECONDS` are assumed, not measured.
"""

import math
from dataclasses import dataclass, replace

DRAIN_SECONDS = 0.25
"""Time within which the running scorers should be able to score all waiting jobs."""
REST_SECONDS = 60.0
"""Length of the period over which the largest needed number of scorers is remembered."""
MEMORY = 0.9
"""Weight of the earlier scores in the exponentially weighted mean of the time of one score."""


@dataclass(frozen=True, slots=True)
class ScorerCount:
    """State of the automatic sizing of a pool of scorers.

    Attributes:
        most: Maximum number of scorers.
        count: Number of scorers that should run now.
        seconds: Running mean of the time of one score; 0 if no score was measured.
        needed: Largest number of scorers that was needed since the time `since`.
        since: Time in seconds at which the current period of `REST_SECONDS` started.
    """

    most: int
    count: int = 1
    seconds: float = 0.0
    needed: int = 1
    since: float = 0.0


def scored(state: ScorerCount, seconds: float) -> ScorerCount:
    """Return `state` with another score, which took `seconds`, in its mean time of a score."""
    if not state.seconds:
        return replace(state, seconds=seconds)
    return replace(state, seconds=MEMORY * state.seconds + (1 - MEMORY) * seconds)


def queued(state: ScorerCount, waiting: int, at_seconds: float) -> ScorerCount:
    """Return `state` with `count` set to the number of scorers that `waiting` unscored jobs need.

    Args:
        state: The state so far.
        waiting: Number of jobs without a score, including jobs that a scorer works on.
        at_seconds: The current time.
    """
    need = math.ceil(min(waiting, waiting * state.seconds / DRAIN_SECONDS))
    need = min(max(1, need), state.most)
    needed = max(need, state.needed)
    if at_seconds - state.since < REST_SECONDS:
        return replace(state, count=max(state.count, need), needed=needed)
    return replace(state, count=needed, needed=need, since=at_seconds)
