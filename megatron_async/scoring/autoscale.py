"""Number of scorers: as many as the queue needs, within `task.scorer_workers`.

A queue of any length is fine if it is worked off within `DRAIN_SECONDS`; what is over that asks
for more scorers at once, never for more than there are responses to score. Fewer are kept only
after a whole `REST_SECONDS` in which fewer were needed, so that bursts do not start and end
processes all the time.

Invariants
- The number stays within 1 and `most`.
- Equal inputs give equal numbers: times come from the caller (the live pools' clock, the
  simulator's virtual one). Both constants are assumed.
"""

import math
from dataclasses import dataclass, replace

DRAIN_SECONDS = 0.25
"""Time in which the scorers that run shall be able to score all that waits."""
REST_SECONDS = 60.0
"""Span over which the largest need is remembered."""
MEMORY = 0.9
"""Weight of the older scores in the mean time of one."""


@dataclass(frozen=True, slots=True)
class ScorerCount:
    """`count` scorers run now; `seconds` is the mean time of one score, 0 = none was seen.

    `needed`: the most that were needed since `since`.
    """

    most: int
    count: int = 1
    seconds: float = 0.0
    needed: int = 1
    since: float = 0.0


def scored(state: ScorerCount, seconds: float) -> ScorerCount:
    """Take the time of one score into the mean."""
    if not state.seconds:
        return replace(state, seconds=seconds)
    return replace(state, seconds=MEMORY * state.seconds + (1 - MEMORY) * seconds)


def queued(state: ScorerCount, waiting: int, at_seconds: float) -> ScorerCount:
    """`waiting` responses have no score at this time, those under a scorer included."""
    need = math.ceil(min(waiting, waiting * state.seconds / DRAIN_SECONDS))
    need = min(max(1, need), state.most)
    needed = max(need, state.needed)
    if at_seconds - state.since < REST_SECONDS:
        return replace(state, count=max(state.count, need), needed=needed)
    return replace(state, count=needed, needed=need, since=at_seconds)
