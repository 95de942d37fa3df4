"""Complete groups that wait for a batch: oldest first, by version and then by order of start.

Invariants
- A group is here exactly while it is complete (all members scored) and in no batch.
- The order is that of the lag bound's deadlines, so the oldest group is never passed over.
- Adding and taking cost O(log n); a group that left otherwise is skipped when it surfaces.
"""

from __future__ import annotations

import heapq

from megatron_async.scheduler.state import GroupEntry


class ReadyGroups:
    """A heap of complete groups; `trajectories` counts their members."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, GroupEntry]] = []
        self._place: dict[int, int] = {}
        self._arrivals = 0
        self.trajectories = 0

    @property
    def count(self) -> int:
        """Complete groups."""
        return len(self._place)

    def add(self, group: GroupEntry) -> None:
        """A group became complete."""
        self._arrivals += 1
        self._place[group.group_id] = self._arrivals
        group.complete = True
        self.trajectories += len(group.members)
        oldest = -1 if group.oldest is None else group.oldest
        heapq.heappush(self._heap, (oldest, group.order, self._arrivals, group))

    def discard(self, group: GroupEntry) -> None:
        """A complete group is dropped, or one of its members starts again."""
        del self._place[group.group_id]
        group.complete = False
        self.trajectories -= len(group.members)

    def take(self) -> GroupEntry:
        """Take the oldest. Raises IndexError when there is none."""
        while True:
            _, _, place, group = heapq.heappop(self._heap)
            if self._place.get(group.group_id) == place:
                self.discard(group)
                return group
