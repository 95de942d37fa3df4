"""Scorers of the simulation: a queue, and as many at work as a live pool would run.

Invariants
- Responses are scored in the order in which they finished, each by one scorer for
  `simulate.reward.verifier_seconds`.
- How many work follows the queue by the live pools' own rule (`tasks.scorer_count`); a scorer
  starts and ends in no time.
"""

from __future__ import annotations

from collections import deque

from megatron_async.tasks import scorer_count
from megatron_async.tasks.scorer_count import ScorerCount


class Scorers:
    """The queue and the scorers that are busy; the caller's clock decides when each has ended."""

    def __init__(self, most: int, seconds: float) -> None:
        self.seconds = seconds
        self.state = scorer_count.scored(ScorerCount(most), seconds)
        self._queue: deque[int] = deque()
        self._busy = 0

    @property
    def unscored(self) -> int:
        """Responses that have no score."""
        return len(self._queue) + self._busy

    def add(self, trajectory_id: int, now: float) -> list[int]:
        """A response has finished; returns those whose scoring begins now."""
        self._queue.append(trajectory_id)
        return self._begin(now)

    def ended(self, now: float) -> list[int]:
        """A scorer has ended; returns those whose scoring begins now."""
        self._busy -= 1
        return self._begin(now)

    def _begin(self, now: float) -> list[int]:
        self.state = scorer_count.queued(self.state, self.unscored, now)
        begun = []
        while self._queue and self._busy < self.state.count:
            self._busy += 1
            begun.append(self._queue.popleft())
        return begun
