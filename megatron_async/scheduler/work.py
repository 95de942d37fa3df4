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
        self._place: dict[int, int] = {}
        self._arrivals = 0

    def push(self, entry: TrajectoryEntry) -> None:
        """Queue `entry` under its present state; an earlier place of it becomes invalid."""
        self._arrivals += 1
        self._place[entry.trajectory_id] = self._arrivals
        heapq.heappush(self._heap, self._item(entry))
        if len(self._heap) > 2 * len(self._place) + _SWEEP_FROM:
            self._heap = [item for item in self._heap if self._valid(item)]
            heapq.heapify(self._heap)

    def remove(self, entry: TrajectoryEntry) -> None:
        """`entry` waits no more, if it did."""
        self._place.pop(entry.trajectory_id, None)

    def _valid(self, item: _Item) -> bool:
        return self._place.get(item[-1].trajectory_id) == item[-2]

    def peek(self) -> TrajectoryEntry | None:
        """The next trajectory, still queued; None when there is no work."""
        heap = self._heap
        while heap:
            item = heap[0]
            entry: TrajectoryEntry = item[-1]
            if self._place.get(entry.trajectory_id) == item[-2]:
                return entry
            heapq.heappop(heap)
        return None

    def pop(self) -> None:
        """Take what `peek` returned."""
        entry = heapq.heappop(self._heap)[-1]
        del self._place[entry.trajectory_id]

    def _item(self, entry: TrajectoryEntry) -> _Item:
        group = entry.group
        priority, place = -group.spec.priority, self._arrivals
        if not entry.tokens:
            return (1, priority, group.order, entry.index, place, entry)
        if self._order == "oldest_first":
            return (0, priority, group.order, entry.index, place, entry)
        if self._order == "newest_first":
            return (0, priority, -group.order, -entry.index, place, entry)
        return (0, priority, -entry.tokens, group.order, entry.index, place, entry)


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
