"""Limits on the start of groups and the emission of batches: capacity, back-pressure, lag.

Only the start of *groups* is limited (`new_groups_allowed`). Members of started groups and partial
trajectories are always let in (as far as slots go): a batch may be waiting for them, so holding
them back could hold everything.

The staleness bound: let B be the groups of a batch, k the bound, v the version that engines serve,
n the next batch. A group whose oldest token is of version a has the deadline a + k: the last batch
it may be in.

Invariants
- Back-pressure never stops a run: what holds new groups back is finished, at least one batch of it
  (`ring_batches` >= 1), and goes on without them, to a score, a batch, the trainer or a drop.
- Capacity: a group is started under v only while fewer than (v + k + 1 - n) B groups are started
  and not consumed. So at most (d + 1 - n) B open groups have a deadline <= d, and taking batches
  in the order of deadlines would meet all of them.
- `may_emit` (`on_stale: wait`) keeps that so although groups complete in any order: batch n waits
  while emitting it would leave more than (d - n) B groups with a deadline <= d, for any d.
- `expired` names every group whose deadline has passed, after each batch: none is ever batched.
- What even waiting cannot save (more groups recovered, or oversampled, than batches fit) never
  blocks: only losses beyond the unavoidable ones do.

Cost of the lag ledger: O(1) to move a group, O(distinct versions), at most about k + 2, for the
questions.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler.state import GroupEntry


class Occupancy(NamedTuple):
    """Counts of started groups by where they are. `open_groups`: neither in a batch nor dropped.

    `finished_groups` are those among them that wait for scores or for a batch, `ready_groups` the
    complete ones of these, `untaken_batches` were emitted and are not taken by the trainer,
    `version` is served by the engines, `next_step` is the next batch.
    """

    open_groups: int
    finished_groups: int
    ready_groups: int
    untaken_batches: int
    version: int
    next_step: int


def groups_started_per_batch(config: ScheduleConfig) -> int:
    """B times `oversample`, rounded up."""
    return math.ceil(config.groups_per_batch * config.oversample)


class Cause(enum.Enum):
    """Reason for which no new group starts when `ring_batches` are full."""

    SCORES = "scores"
    TRAINER = "trainer"


def held_back_by(config: ScheduleConfig, now: Occupancy) -> Cause | None:
    """Return the reason for which no new group may start, if too much waits for training.

    Under `overflow: drop_oldest` only what has no score yet counts: the rest makes room by leaving.
    """
    limit = config.ring_batches * config.groups_per_batch
    unscored = now.finished_groups - now.ready_groups
    complete = now.untaken_batches * config.groups_per_batch + now.ready_groups
    if config.overflow == "drop_oldest":
        complete = 0
    if unscored + complete < limit:
        return None
    return Cause.TRAINER if complete >= limit else Cause.SCORES


def new_groups_allowed(config: ScheduleConfig, now: Occupancy) -> int | None:
    """Groups that may be started now; None = as many as slots take.

    - lag bound k: open groups stay within (version + k + 1 - next_step) batches, as in AReaL's
      and PRIME-RL's capacity rules, plus the surplus that `oversample` asks for;
    - `refill: batch`: no more than one (oversampled) batch is open;
    - back-pressure: none while finished groups fill `ring_batches` (`held_back_by`).
    """
    batch = config.groups_per_batch
    limits = []
    if config.max_async_level is not None:
        batches = now.version + config.max_async_level + 1 - now.next_step
        surplus = groups_started_per_batch(config) - batch
        limits.append((batches * batch + surplus if batches > 0 else 0) - now.open_groups)
    if config.refill == "batch":
        limits.append(groups_started_per_batch(config) - now.open_groups)
    if held_back_by(config, now) is not None:
        limits.append(0)
    return max(0, min(limits)) if limits else None


class LagLedger:
    """Open groups by the version of their oldest token. Without a bound it stays empty.

    `next_step` is the next batch to emit.
    """

    def __init__(self, bound: int | None, groups_per_batch: int, next_step: int) -> None:
        self.next_step = next_step
        self._bound = bound
        self._batch = groups_per_batch
        self._groups: dict[int, dict[int, GroupEntry]] = {}
        self._complete: dict[int, int] = {}

    def place(self, group: GroupEntry, oldest: int | None) -> None:
        """Record the oldest version of an open, incomplete group."""
        if oldest == group.oldest:
            return
        self.remove(group)
        group.oldest = oldest
        if self._bound is not None and oldest is not None:
            self._groups.setdefault(oldest, {})[group.group_id] = group

    def completed(self, group: GroupEntry, complete: bool) -> None:
        """A placed group became complete, or is not so any more (a restart)."""
        if self._bound is not None and group.oldest is not None:
            change = 1 if complete else -1
            self._complete[group.oldest] = self._complete.get(group.oldest, 0) + change

    def remove(self, group: GroupEntry) -> None:
        """The group is consumed or dropped; call `completed(False)` first if it was complete."""
        if group.oldest is None or self._bound is None:
            return
        bucket = self._groups.get(group.oldest)
        if bucket is not None:
            bucket.pop(group.group_id, None)
            if not bucket:
                del self._groups[group.oldest]
                self._complete.pop(group.oldest, None)

    @property
    def floor(self) -> int:
        """Oldest version that the next batch may hold."""
        return 0 if self._bound is None else max(0, self.next_step - self._bound)

    def expired(self) -> list[GroupEntry]:
        """Groups that can be in no batch from the next one on, oldest first."""
        floor = self.floor
        versions = sorted(version for version in self._groups if version < floor)
        return [group for version in versions for group in list(self._groups[version].values())]

    def may_emit(self) -> bool:
        """Return whether a batch of the oldest complete groups may be emitted now."""
        if self._bound is None:
            return True
        total = complete = unavoidable = lost = 0
        for version in sorted(self._groups):
            total += len(self._groups[version])
            complete += self._complete.get(version, 0)
            later_batches = max(0, version + self._bound - self.next_step) * self._batch
            unavoidable = max(unavoidable, total - later_batches - self._batch)
            lost = max(lost, total - min(self._batch, complete) - later_batches)
        return lost <= unavoidable
