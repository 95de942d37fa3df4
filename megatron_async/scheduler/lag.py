"""Enforces the staleness bound: in batch n, only tokens of policy version max(0, n - k) or newer
are trained. The module decides which groups the next batch may contain and which it must contain.

Let B be the number of groups of a batch, k the bound (`schedule.max_async_level`), v the number of
the version that the engines serve, and n the number of the next batch. A group whose oldest token
is of version a has the deadline a + k, which is the number of the last batch that may contain it. A
group is open while it is started and neither batched nor dropped.

Invariants
- Capacity (`Scheduler._groups_allowed`): a group is started under version v only while fewer than
  (v + k + 1 - n) * B groups are open. So at most (d + 1 - n) * B open groups have a deadline <= d.
  That is as many as the batches n to d contain, so all deadlines are met if batches take groups in
  the order of their deadlines.
- Groups become complete in any order. With `on_stale: wait`, batch n is therefore not emitted
  (`may_emit`) while, for some d, more than (d - n) * B groups with a deadline <= d would remain
  after it, because the batches n + 1 to d could not contain all of them.
- After each batch, `expired` returns every group whose deadline has passed. No such group is ever
  batched, except with `on_stale: mask`, which masks the tokens that are too old.
- After a resume or with `oversample`, more groups may be open than the batches until their
  deadlines can contain. Some of them are lost even if every batch waits for the oldest groups. A
  batch waits only if emitting it now would lose more groups than that.

Cost: recording or removing a group takes O(1). The other methods take O(number of different oldest
versions), which is at most about k + 2; for each of them, `may_emit` counts complete groups by
binary search.
"""

from collections.abc import Callable

from megatron_async.scheduler.state import GroupEntry


class LagLedger:
    """Open groups (started, and neither batched nor dropped), by the policy number of their oldest
    token. Without a staleness bound, no group is kept here.

    `next_step` is the number of the next batch to emit.
    """

    def __init__(self, bound: int | None, groups_per_batch: int, next_step: int) -> None:
        self.next_step = next_step
        self._bound = bound
        self._batch = groups_per_batch
        self._groups: dict[int, dict[int, GroupEntry]] = {}

    def record(self, group: GroupEntry, oldest: int | None) -> None:
        """Record `oldest`, the lower bound of the policy numbers of an open group's tokens; None if
        the group has no such bound (`GroupEntry.oldest`)."""
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
        """Return whether the oldest complete groups may be emitted as the next batch now. The
        result is False if other groups would then become too old for their batches, although they
        would not if this batch waited until older groups are complete.

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
