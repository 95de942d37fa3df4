"""Provides the queue of trajectories that wait until one more request may run, and the queue of
complete groups that wait for a batch.

Invariants
- `WorkQueue`: partial trajectories come first, then members of started groups that have no token
  yet. (An episode counts as partial as soon as it has a turn.) In each of the two classes, higher
  priority comes first. With equal priority, partial trajectories are in the order that
  `schedule.buffer_order` says, and all others oldest first.
- `ReadyGroups`: it contains a group exactly while the group is complete (all members are scored)
  and in no batch. Groups are sorted by the policy number of their oldest token. So the group that
  becomes too old first is first, and no newer group can be batched before it.
- The work queue may be long. Pushing and popping cost amortized O(log n) for each trajectory, and
  popping a large share of the queue is one sort. Removing a trajectory only makes its item invalid.
  An invalid item is skipped when it reaches the front, and all invalid items are removed once they
  are the majority.
"""

import bisect
import heapq
import itertools
from operator import itemgetter
from typing import Any, Literal

from megatron_async.scheduler.state import GroupEntry, TrajectoryEntry

BufferOrder = Literal["oldest_first", "newest_first", "longest_first"]
_Item = tuple[Any, ...]
"""Item of the heap: the integers by which it is sorted, most important first, then its ticket (the
number of the push), then the trajectory's entry. The item is valid while the entry has the same
ticket."""
_SWEEP_FROM = 64
_FEW, _LARGE_PART = 8, 8
"""`pop(count)` sorts the whole queue if `count` is larger than `_FEW` plus the length of the queue
divided by `_LARGE_PART`, because sorting is then cheaper than popping from the heap."""


class WorkQueue:
    """Trajectories of started groups that wait until one more request may run, in the order in
    which they are to be submitted."""

    def __init__(self, order: BufferOrder) -> None:
        self._order = order
        self._heap: list[_Item] = []
        self._pushed: list[_Item] = []
        self._waiting = 0
        self._arrivals = 0

    def push(self, entry: TrajectoryEntry) -> None:
        """Add trajectory `entry` at the position that follows from its current tokens. If it is in
        the queue already, its old item becomes invalid."""
        if not entry.ticket:
            self._waiting += 1
        self._arrivals = entry.ticket = self._arrivals + 1
        group, ticket = entry.group, entry.ticket
        priority, order = -group.spec.priority, group.order
        item: _Item
        if not entry.tokens and not entry.extra_context_tokens:
            item = (1, priority, order, entry.index, ticket, entry)
        elif self._order == "oldest_first":
            item = (0, priority, order, entry.index, ticket, entry)
        elif self._order == "newest_first":
            item = (0, priority, -order, -entry.index, ticket, entry)
        else:
            item = (0, priority, -entry.tokens, order, entry.index, ticket, entry)
        self._pushed.append(item)
        if len(self._heap) + len(self._pushed) > 2 * self._waiting + _SWEEP_FROM:
            self._heap, self._pushed = self._valid(), []
            heapq.heapify(self._heap)

    def _valid(self) -> list[_Item]:
        return [
            item
            for item in itertools.chain(self._heap, self._pushed)
            if item[-1].ticket == item[-2]
        ]

    def remove(self, entry: TrajectoryEntry) -> None:
        """Remove trajectory `entry` from the queue, if it is in it."""
        if entry.ticket:
            entry.ticket = 0
            self._waiting -= 1

    def pop(self, count: int) -> list[TrajectoryEntry]:
        """Pop the first `count` trajectories in order, or all if there are fewer."""
        if count > _FEW + (len(self._heap) + len(self._pushed)) // _LARGE_PART:
            valid = sorted(self._valid())
            popped = [item[-1] for item in valid[:count]]
            self._heap = valid[count:]  # The rest is sorted, and a sorted list is a valid heap.
        else:
            popped = self._pop(count)
        self._pushed = []
        for entry in popped:
            entry.ticket = 0
        self._waiting -= len(popped)
        return popped

    def _pop(self, count: int) -> list[TrajectoryEntry]:
        heap = self._heap
        for item in self._pushed:
            heapq.heappush(heap, item)
        popped: list[TrajectoryEntry] = []
        while heap and len(popped) < count:
            item = heapq.heappop(heap)
            if item[-1].ticket == item[-2]:
                popped.append(item[-1])
        return popped


_OLDEST = itemgetter(0)


class ReadyGroups:
    """Complete groups that wait for a batch, sorted by the policy number of their oldest token.

    A group without tokens of the policy is sorted as if that number were -1.
    """

    def __init__(self) -> None:
        self._groups: list[tuple[int, int, GroupEntry]] = []

    @property
    def count(self) -> int:
        """Number of complete groups."""
        return len(self._groups)

    def up_to(self, version: int) -> int:
        """Return the number of complete groups whose oldest token was generated by policy number
        `version` or an older policy.

        Groups without tokens of the policy are not counted.
        """
        first = bisect.bisect_left(self._groups, 0, key=_OLDEST)
        return bisect.bisect_right(self._groups, version, key=_OLDEST) - first

    def add(self, group: GroupEntry) -> None:
        """Add a group whose members have all been scored."""
        group.complete = True
        oldest = -1 if group.oldest is None else group.oldest
        bisect.insort(self._groups, (oldest, group.order, group))

    def discard(self, group: GroupEntry) -> None:
        """Remove `group`, if it is complete, because it is dropped or one of its members
        restarts."""
        if group.complete:
            group.complete = False
            self._groups = [item for item in self._groups if item[-1] is not group]

    def pop(self) -> GroupEntry:
        """Pop the oldest complete group.

        Raises:
            IndexError: If there is no group.
        """
        group = self._groups.pop(0)[-1]
        group.complete = False
        return group
