"""Counts what the scheduler has done, and provides the snapshot that metrics read.

Invariants
- Counts only grow.
- A snapshot (`SchedulerView`) is never used for decisions.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_async.scheduler.state import GroupEntry, TrajectoryEntry
from megatron_async.trajectory.types import DropReason, PolicyVersion


class Counts:
    """Counts of drops, restarts and tokens since the scheduler was created."""

    def __init__(self) -> None:
        self.dropped: Counter[DropReason] = Counter()
        self.restarted = 0
        self.regenerated = 0
        self.batched_tokens = 0
        self.wasted_tokens = 0
        self.filtered_tokens = 0

    def restart(self, entry: TrajectoryEntry) -> None:
        """Count that trajectory `entry` restarts from its prompt, which wastes its tokens."""
        self.restarted += 1
        self.wasted_tokens += entry.tokens

    def drop(self, entry: TrajectoryEntry, reason: DropReason) -> None:
        """Count that trajectory `entry` is dropped for `reason`, which wastes its tokens."""
        self.dropped[reason] += 1
        self.wasted_tokens += entry.tokens
        if reason is DropReason.FILTERED:
            self.filtered_tokens += entry.tokens

    def batch(self, groups: Sequence[GroupEntry]) -> None:
        """Count the tokens of these complete groups, which the scheduler hands to the trainer as
        one batch."""
        self.batched_tokens += sum(entry.tokens for group in groups for entry in group.members)


@dataclass(frozen=True, slots=True)
class SchedulerView:
    """Snapshot of the scheduler's counts for metrics.

    Attributes:
        version: Policy version that was published last and that the engines serve.
        next_step: Number of the next batch to emit.
        concurrency: Largest number of requests in flight (N').
        in_flight: Number of requests in flight.
        buffered_partial: Number of partial trajectories.
        unscored: Number of trajectories with a complete response and no score.
        open_groups: Number of groups that were started and are neither batched nor dropped.
        finished_groups: Number of open groups whose members all have a complete response.
        complete_groups: Number of open groups whose members all have a score.
        dropped: Number of dropped trajectories, by reason.
        restarted: Number of restarts of trajectories.
        regenerated: Number of those restarts whose cause was a failed scorer or environment.
        wasted_tokens: Number of tokens that the policy generated for dropped and restarted
            trajectories.
        filtered_tokens: Number of those tokens in groups that were dropped because all their
            rewards are equal.
        open_episodes: Number of episodes whose environment was started and that have not ended.
        waiting: Number of open episodes whose environment is being called.
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
