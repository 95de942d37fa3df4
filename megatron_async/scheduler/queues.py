"""Queues of the scheduler: trajectories for a slot, complete groups for a batch.

Invariants
- `WorkQueue`: partial trajectories (of episodes: all with a turn) come first, then members of
  started groups that have no token yet; within each class higher priority first. Partial
  trajectories follow `buffer_order`; the rest is oldest first.
- `ReadyGroups`: a group is here exactly while it is complete (all members scored) and in no batch.
  The order is that of the staleness bound's deadlines, so the oldest group is never passed over.
- In the work queue, which may be long, pushing and taking cost O(log n) each, amortized; taking a
  large part of it is one sort. A place that became invalid (dropped, restarted, finished late) is
  skipped when it surfaces; such places are swept out when they are the majority.
"""

import bisect
import heapq
import itertools
from operator import itemgetter
from typing import Any, Literal

from megatron_async.scheduler.state import GroupEntry, TrajectoryEntry

BufferOrder = Literal["oldest_first", "newest_first", "longest_first"]
_Item = tuple[Any, ...]
"""Integers in order of importance, the place in order of arrival, and the entry."""
_SWEEP_FROM = 64
_FEW, _LARGE_PART = 8, 8
"""Taking more than these few and than one in so many sorts the queue, which is cheaper then."""


class WorkQueue:
    """Trajectories of started groups that wait for a slot."""

    def __init__(self, order: BufferOrder) -> None:
        self._order = order
        self._heap: list[_Item] = []
        self._pushed: list[_Item] = []
        self._waiting = 0
        self._arrivals = 0

    def push(self, entry: TrajectoryEntry) -> None:
        """Queue `entry` under its present state; an earlier place of it becomes invalid."""
        if not entry.place:
            self._waiting += 1
        self._arrivals = entry.place = self._arrivals + 1
        group, place = entry.group, entry.place
        priority, order = -group.spec.priority, group.order
        item: _Item
        if not entry.tokens and not entry.extra_context_tokens:
            item = (1, priority, order, entry.index, place, entry)
        elif self._order == "oldest_first":
            item = (0, priority, order, entry.index, place, entry)
        elif self._order == "newest_first":
            item = (0, priority, -order, -entry.index, place, entry)
        else:
            item = (0, priority, -entry.tokens, order, entry.index, place, entry)
        self._pushed.append(item)
        if len(self._heap) + len(self._pushed) > 2 * self._waiting + _SWEEP_FROM:
            self._heap, self._pushed = self._valid(), []
            heapq.heapify(self._heap)

    def _valid(self) -> list[_Item]:
        return [
            item for item in itertools.chain(self._heap, self._pushed) if item[-1].place == item[-2]
        ]

    def remove(self, entry: TrajectoryEntry) -> None:
        """`entry` waits no more, if it did."""
        if entry.place:
            entry.place = 0
            self._waiting -= 1

    def take(self, count: int) -> list[TrajectoryEntry]:
        """The next `count` trajectories in order, or as many as there are."""
        if count > _FEW + (len(self._heap) + len(self._pushed)) // _LARGE_PART:
            valid = sorted(self._valid())
            taken = [item[-1] for item in valid[:count]]
            self._heap = valid[count:]  # sorted, therefore a heap
        else:
            taken = self._pop(count)
        self._pushed = []
        for entry in taken:
            entry.place = 0
        self._waiting -= len(taken)
        return taken

    def _pop(self, count: int) -> list[TrajectoryEntry]:
        heap = self._heap
        for item in self._pushed:
            heapq.heappush(heap, item)
        taken: list[TrajectoryEntry] = []
        while heap and len(taken) < count:
            item = heapq.heappop(heap)
            if item[-1].place == item[-2]:
                taken.append(item[-1])
        return taken


_OLDEST = itemgetter(0)


class ReadyGroups:
    """Complete groups, sorted by their oldest version (-1 where they have none)."""

    def __init__(self) -> None:
        self._groups: list[tuple[int, int, GroupEntry]] = []

    @property
    def count(self) -> int:
        """Complete groups."""
        return len(self._groups)

    def up_to(self, version: int) -> int:
        """Complete groups whose oldest token is of this version or an older one.

        Those without any token of the policy have no version and are not counted.
        """
        first = bisect.bisect_left(self._groups, 0, key=_OLDEST)
        return bisect.bisect_right(self._groups, version, key=_OLDEST) - first

    def add(self, group: GroupEntry) -> None:
        """A group became complete."""
        group.complete = True
        oldest = -1 if group.oldest is None else group.oldest
        bisect.insort(self._groups, (oldest, group.order, group))

    def discard(self, group: GroupEntry) -> None:
        """A group is dropped, or one of its members starts again; it was complete or not."""
        if group.complete:
            group.complete = False
            self._groups = [item for item in self._groups if item[-1] is not group]

    def take(self) -> GroupEntry:
        """Take the oldest. Raises IndexError when there is none."""
        group = self._groups.pop(0)[-1]
        group.complete = False
        return group
