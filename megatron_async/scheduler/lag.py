"""Enforces the staleness bound: which groups the next batch may contain, and which it must contain.

Let B be the number of groups of a batch, k the bound, v the version that the engines serve, and n
the next batch. A group whose oldest token is of version a has the deadline a + k: the last batch
that may contain it.

Invariants
- Capacity (`Scheduler._groups_allowed`): a group is started under version v only while fewer than
  (v + k + 1 - n) B groups are started and not consumed. So at most (d + 1 - n) B open groups have a
  deadline <= d, and batches that take groups in the order of deadlines would meet all deadlines.
- `may_emit` (`on_stale: wait`) preserves this although groups complete in any order: batch n waits
  while emitting it would leave more than (d - n) B groups with a deadline <= d, for any d.
- After each batch, `expired` returns every group whose deadline has passed. None of them is ever
  batched.
- Losses that waiting cannot avoid never block a batch. They occur if more groups were recovered or
  oversampled than the batches before their deadlines have room for. Only additional losses block.

Cost: O(1) to move a group. The other methods take O(distinct versions), at most about k + 2. For
each version, `may_emit` counts complete groups in O(log n).
"""

from collections.abc import Callable

from megatron_async.scheduler.state import GroupEntry


class LagLedger:
    """Open groups, by the policy number of their oldest token; empty if there is no staleness
    bound.

    `next_step` is the number of the next batch to emit.
    """

    def __init__(self, bound: int | None, groups_per_batch: int, next_step: int) -> None:
        self.next_step = next_step
        self._bound = bound
        self._batch = groups_per_batch
        self._groups: dict[int, dict[int, GroupEntry]] = {}

    def record(self, group: GroupEntry, oldest: int | None) -> None:
        """Record that the oldest token of the open group `group` is of policy number `oldest`."""
        if oldest == group.oldest:
            return
        self.remove(group)
        group.oldest = oldest
        if self._bound is not None and oldest is not None:
            self._groups.setdefault(oldest, {})[group.spec.group_id] = group

    def remove(self, group: GroupEntry) -> None:
        """Remove a group that is batched or dropped."""
        if group.oldest is None or self._bound is None:
            return
        same_version = self._groups[group.oldest]
        del same_version[group.spec.group_id]
        if not same_version:
            del self._groups[group.oldest]

    @property
    def floor(self) -> int:
        """Oldest policy number whose tokens the next batch may contain."""
        return 0 if self._bound is None else max(0, self.next_step - self._bound)

    def expired(self) -> list[GroupEntry]:
        """Return the groups that are too old for the next batch and for every later one, oldest
        first."""
        floor = self.floor
        versions = sorted(version for version in self._groups if version < floor)
        return [group for version in versions for group in list(self._groups[version].values())]

    def may_emit(self, complete: Callable[[int], int]) -> bool:
        """Return whether the oldest complete groups may be emitted as the next batch now.

        Args:
            complete: Function that returns, for a policy number, how many complete groups have an
                oldest token of this number or an older one.
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
