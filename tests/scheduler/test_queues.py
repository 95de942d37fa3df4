"""Tests of the work queue: its order, and the removal of invalid items."""

from __future__ import annotations

import random

import pytest

from megatron_async.scheduler.events import GroupSpec
from megatron_async.scheduler.queues import BufferOrder, WorkQueue
from megatron_async.scheduler.state import TrajectoryEntry, new_group


def entries(count: int) -> list[TrajectoryEntry]:
    group = new_group(GroupSpec(0, tuple(range(count)), 10))
    group.order = 0
    return group.members


def drained(queue: WorkQueue, at_once: int = 1) -> list[int]:
    taken: list[int] = []
    while entries := queue.pop(at_once):
        taken += [entry.trajectory_id for entry in entries]
    return taken


@pytest.mark.parametrize("order", ["oldest_first", "newest_first", "longest_first"])
def test_work_queue_pops_many_in_the_order_of_single_pops(order: BufferOrder) -> None:
    def filled() -> WorkQueue:
        queue, chance = WorkQueue(order), random.Random(1)
        members = entries(300)
        chance.shuffle(members)
        for entry in members:
            entry.add_tokens(chance.randrange(50), 0)
            queue.push(entry)
        for entry in members[::3]:
            queue.remove(entry)
        for entry in members[::6]:
            queue.push(entry)
        return queue

    singly = drained(filled())
    assert len(singly) == len(set(singly)) == 250
    assert drained(filled(), 40) == drained(filled(), 1000) == singly
    queue = filled()
    mixed = [entry.trajectory_id for count in (3, 100, 1, 1000) for entry in queue.pop(count)]
    assert mixed == singly and not queue.pop(1)


def test_work_queue_removes_invalid_items() -> None:
    queue = WorkQueue("newest_first")
    for entry in (members := entries(5000)):
        entry.add_tokens(1, 0)
        queue.push(entry)
    for entry in members[:-1]:
        queue.remove(entry)
    queue.push(members[-1])
    assert len(queue._heap) == 1
    assert drained(queue) == [4999]
