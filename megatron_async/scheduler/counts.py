"""Running counts of the scheduler: trajectories by state, what was dropped, what was wasted.

Invariants
- `count[state]` is the number of trajectories in that state that are neither batched nor dropped.
- `partial_tokens` is the number of response tokens of those that are partial.
- Everything else only grows, but for the off-policy share, which is the newest batch's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from megatron_async.scheduler.state import GroupEntry, TrajectoryEntry
from megatron_async.trajectory.types import DropReason, TrajectoryState

_PARTIAL = TrajectoryState.PARTIAL


class Tally:
    """Counts; every change of a trajectory's state passes here."""

    def __init__(self) -> None:
        self.count: dict[TrajectoryState, int] = dict.fromkeys(TrajectoryState, 0)
        self.dropped: Counter[DropReason] = Counter()
        self.restarted = 0
        self.regenerated = 0
        self.batched_tokens = 0
        self.wasted_tokens = 0
        self.filtered_tokens = 0
        self.partial_tokens = 0
        self.off_policy_share = 0.0

    @property
    def unscored(self) -> int:
        """Trajectories that have their whole response and no score."""
        return self.count[TrajectoryState.FINISHED]

    def add(self, entries: Sequence[TrajectoryEntry]) -> None:
        """New trajectories, pending."""
        self.count[TrajectoryState.PENDING] += len(entries)

    def move(self, entry: TrajectoryEntry, state: TrajectoryState) -> None:
        """`entry` is in `state` from now on."""
        before, count = entry.state, self.count
        count[before] -= 1
        count[state] += 1
        entry.state = state
        if before is _PARTIAL:
            self.partial_tokens -= entry.tokens
        if state is _PARTIAL:
            self.partial_tokens += entry.tokens

    def _leave(self, entry: TrajectoryEntry) -> None:
        self.count[entry.state] -= 1
        if entry.state is TrajectoryState.PARTIAL:
            self.partial_tokens -= entry.tokens

    def restart(self, entry: TrajectoryEntry) -> None:
        """`entry` goes back to its prompt."""
        self.restarted += 1
        self.wasted_tokens += entry.tokens
        self.move(entry, TrajectoryState.PENDING)

    def drop(self, entry: TrajectoryEntry, reason: DropReason) -> None:
        """`entry` leaves the run."""
        self._leave(entry)
        self.dropped[reason] += 1
        self.wasted_tokens += entry.tokens
        if reason is DropReason.FILTERED:
            self.filtered_tokens += entry.tokens

    def forget(self, entry: TrajectoryEntry) -> None:
        """`entry` had left the run before a restart of the process."""
        self._leave(entry)

    def batch(self, groups: Sequence[GroupEntry], step: int) -> None:
        """These complete groups are the batch of `step`."""
        total = current = 0
        for group in groups:
            for entry in group.members:
                self._leave(entry)
                total += entry.tokens
                current += entry.tokens_of(step)
        self.off_policy_share = 1 - current / total if total else 0.0
        self.batched_tokens += total
