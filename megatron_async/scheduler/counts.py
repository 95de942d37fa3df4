"""Running counts of the scheduler, and the snapshot of them that metrics read.

Invariants
- Counts only grow.
- A view is never used for decisions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_async.scheduler.state import GroupEntry, TrajectoryEntry
from megatron_async.trajectory.types import DropReason, PolicyVersion


class Counts:
    """Counts of what has happened."""

    def __init__(self) -> None:
        self.dropped: Counter[DropReason] = Counter()
        self.restarted = 0
        self.regenerated = 0
        self.batched_tokens = 0
        self.wasted_tokens = 0
        self.filtered_tokens = 0

    def restart(self, entry: TrajectoryEntry) -> None:
        """Count that `entry` goes back to its prompt."""
        self.restarted += 1
        self.wasted_tokens += entry.tokens

    def drop(self, entry: TrajectoryEntry, reason: DropReason) -> None:
        """`entry` leaves the run."""
        self.dropped[reason] += 1
        self.wasted_tokens += entry.tokens
        if reason is DropReason.FILTERED:
            self.filtered_tokens += entry.tokens

    def batch(self, groups: Sequence[GroupEntry]) -> None:
        """Count the tokens of these complete groups, which make a batch."""
        self.batched_tokens += sum(entry.tokens for group in groups for entry in group.members)


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """A snapshot. Trajectory counts unless the name is of something else.

    `unscored`: finished, no score yet. `finished_groups`: groups whose members all are finished or
    scored, `complete_groups` those of them that have all scores. `wasted_tokens`: of dropped and
    restarted trajectories; `regenerated` counts restarts because a scorer or an environment failed,
    which are among the `restarted` ones; `waiting` are those of the `open_episodes` whose
    environment is asked; `filtered_tokens` is the part for groups without reward variance.
    """

    version: PolicyVersion
    next_step: int
    concurrency: int
    in_flight: int
    buffered_partial: int
    unscored: int
    open_groups: int
    finished_groups: int
    complete_groups: int
    dropped: Mapping[DropReason, int]
    restarted: int
    regenerated: int
    wasted_tokens: int
    filtered_tokens: int
    open_episodes: int = 0
    waiting: int = 0
