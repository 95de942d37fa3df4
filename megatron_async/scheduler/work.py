"""The work queue: which trajectory is submitted next.

Invariants
- Partial trajectories come first, then members of started groups that have no token yet, then new
  groups; within each class higher priority first.
- Partial trajectories follow `buffer_order`; everything else is oldest first.
- Pushing and taking cost O(log n), amortised. A place that became invalid (dropped, restarted,
  finished late) is skipped when it surfaces, and swept out when such places are the majority.
"""

from __future__ import annotations

import heapq
from typing import Any, Literal

from megatron_async.scheduler.state import GroupEntry, TrajectoryEntry

BufferOrder = Literal["oldest_first", "newest_first", "longest_first"]
_Item = tuple[Any, ...]
"""Integers in order of importance, the place in order of arrival, and the entry."""
_SWEEP_FROM = 64


class WorkQueue:
    """Trajectories of started groups that wait for a slot."""

    def __init__(self, order: BufferOrder) -> None:
        self._order = order
        self._heap: list[_Item] = []
        self._waiting = 0
        self._arrivals = 0

    def push(self, entry: TrajectoryEntry) -> None:
        """Queue `entry` under its present state; an earlier place of it becomes invalid."""
        if not entry.place:
            self._waiting += 1
        self._arrivals = entry.place = self._arrivals + 1
        heap, group = self._heap, entry.group
        priority, order, place = -group.spec.priority, group.order, entry.place
        item: _Item
        if not entry.tokens:
            item = (1, priority, order, entry.index, place, entry)
        elif self._order == "oldest_first":
            item = (0, priority, order, entry.index, place, entry)
        elif self._order == "newest_first":
            item = (0, priority, -order, -entry.index, place, entry)
        else:
            item = (0, priority, -entry.tokens, order, entry.index, place, entry)
        heapq.heappush(heap, item)
        if len(heap) > 2 * self._waiting + _SWEEP_FROM:
            self._heap = [item for item in heap if item[-1].place == item[-2]]
            heapq.heapify(self._heap)

    def remove(self, entry: TrajectoryEntry) -> None:
        """`entry` waits no more, if it did."""
        if entry.place:
            entry.place = 0
            self._waiting -= 1

    def peek(self) -> TrajectoryEntry | None:
        """The next trajectory, still queued; None when there is no work."""
        heap = self._heap
        while heap:
            item = heap[0]
            entry: TrajectoryEntry = item[-1]
            if entry.place == item[-2]:
                return entry
            heapq.heappop(heap)
        return None

    def pop(self) -> None:
        """Take what `peek` returned."""
        heapq.heappop(self._heap)[-1].place = 0
        self._waiting -= 1


class FreshGroups:
    """Groups that have a prompt but no submitted trajectory: higher priority, then older first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, GroupEntry]] = []
        self._arrivals = 0

    def push(self, group: GroupEntry) -> None:
        self._arrivals += 1
        heapq.heappush(self._heap, (-group.spec.priority, self._arrivals, group))

    def pop(self) -> GroupEntry:
        return heapq.heappop(self._heap)[2]

    def __len__(self) -> int:
        return len(self._heap)
