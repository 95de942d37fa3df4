"""The staleness bound: which open groups the next batch may hold, and which must be in it.

Let B be the groups of a batch, k the bound, v the version that engines serve, n the next batch. A
group whose oldest token is of version a has the deadline a + k: the last batch it may be in.

Invariants
- Capacity (`Scheduler._groups_allowed`): a group is started under v only while fewer than
  (v + k + 1 - n) B groups are started and not consumed. So at most (d + 1 - n) B open groups have a
  deadline <= d, and taking batches in the order of deadlines would meet all of them.
- `may_emit` (`on_stale: wait`) keeps that so although groups complete in any order: batch n waits
  while emitting it would leave more than (d - n) B groups with a deadline <= d, for any d.
- `expired` names every group whose deadline has passed, after each batch: none is ever batched.
- What even waiting cannot save (more groups recovered, or oversampled, than batches fit) never
  blocks: only losses beyond the unavoidable ones do.

Cost: O(1) to move a group; for the rest O(distinct versions), at most about k + 2, each of which
`may_emit` looks up in the complete groups (O(log n)).
"""

from collections.abc import Callable

from megatron_async.scheduler.state import GroupEntry


class LagLedger:
    """Open groups by the version of their oldest token. Without a bound it stays empty.

    `next_step` is the next batch to emit.
    """

    def __init__(self, bound: int | None, groups_per_batch: int, next_step: int) -> None:
        self.next_step = next_step
        self._bound = bound
        self._batch = groups_per_batch
        self._groups: dict[int, dict[int, GroupEntry]] = {}

    def place(self, group: GroupEntry, oldest: int | None) -> None:
        """Record the oldest version of an open, incomplete group."""
        if oldest == group.oldest:
            return
        self.remove(group)
        group.oldest = oldest
        if self._bound is not None and oldest is not None:
            self._groups.setdefault(oldest, {})[group.spec.group_id] = group

    def remove(self, group: GroupEntry) -> None:
        """The group is consumed or dropped."""
        if group.oldest is None or self._bound is None:
            return
        same_version = self._groups[group.oldest]
        del same_version[group.spec.group_id]
        if not same_version:
            del self._groups[group.oldest]

    @property
    def floor(self) -> int:
        """Oldest version that the next batch may hold."""
        return 0 if self._bound is None else max(0, self.next_step - self._bound)

    def expired(self) -> list[GroupEntry]:
        """Groups that can be in no batch from the next one on, oldest first."""
        floor = self.floor
        versions = sorted(version for version in self._groups if version < floor)
        return [group for version in versions for group in list(self._groups[version].values())]

    def may_emit(self, complete: Callable[[int], int]) -> bool:
        """Return whether a batch of the oldest complete groups may be emitted now.

        `complete(version)`: complete groups whose oldest token is of this version or an older one.
        """
        if self._bound is None:
            return True
        total = unavoidable = lost = 0
        for version in sorted(self._groups):
            total += len(self._groups[version])
            later_batches = max(0, version + self._bound - self.next_step) * self._batch
            unavoidable = max(unavoidable, total - later_batches - self._batch)
            lost = max(lost, total - min(self._batch, complete(version)) - later_batches)
        return lost <= unavoidable
