"""The work queue: order, places that become invalid, and that those do not pile up."""

from __future__ import annotations

from megatron_async.scheduler.events import GroupSpec
from megatron_async.scheduler.state import TrajectoryEntry, new_group
from megatron_async.scheduler.work import WorkQueue


def entries(count: int) -> list[TrajectoryEntry]:
    group = new_group(GroupSpec(0, tuple(range(count)), 10))
    group.order = 0
    return group.members


def drained(queue: WorkQueue, at_once: int = 1) -> list[int]:
    taken: list[int] = []
    while entries := queue.take(at_once):
        taken += [entry.trajectory_id for entry in entries]
    return taken


def test_an_entry_is_queued_once_under_its_newest_state() -> None:
    queue = WorkQueue("longest_first")
    first, second = entries(2)
    first.tokens, second.tokens = 9, 5
    queue.push(first)
    queue.push(second)
    first.tokens = 0  # restarted
    queue.push(first)
    assert drained(queue) == [1, 0]


def test_a_removed_entry_never_surfaces() -> None:
    queue = WorkQueue("oldest_first")
    for entry in (members := entries(3)):
        queue.push(entry)
    queue.remove(members[0])
    queue.remove(members[0])
    assert drained(queue) == [1, 2]


def test_invalid_places_do_not_pile_up() -> None:
    queue = WorkQueue("newest_first")
    for entry in (members := entries(5000)):
        entry.tokens = 1
        queue.push(entry)
    for entry in members[:-1]:
        queue.remove(entry)
    queue.push(members[-1])
    assert len(queue._heap) == 1
    assert drained(queue) == [4999]
