"""Tests that `ManyAborted` equals single events: same actions, same state afterward."""

from __future__ import annotations

import pytest

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import PolicyVersion
from tests.scheduler.policies import preset
from tests.scheduler.world import Weather, World

POLICIES = {
    "copris": preset("copris", concurrency=30),
    "restart of what is stale": preset(
        "copris", concurrency=30, max_async_level=1, on_stale="restart"
    ),
    "drop of stale trajectories": preset(
        "copris", concurrency=30, max_async_level=1, on_stale="drop"
    ),
    "aborts while training continues": preset("async", concurrency=30, boundary="abort"),
    "in-flight updates": preset("pipeline", concurrency=30, boundary="abort"),
}


def recorded_one_by_one(
    config: ScheduleConfig, seed: int
) -> list[tuple[ev.Event, list[ev.Action]]]:
    """Random run in which sometimes all aborted requests end directly one after the other."""
    world = World(config, Weather(engines=0), seed)  # Engines come up once recording has started.
    record: list[tuple[ev.Event, list[ev.Action]]] = []
    step = world.scheduler.step

    def recording(event: ev.Event) -> list[ev.Action]:
        actions = step(event)
        record.append((event, actions))
        return actions

    world.scheduler.step = recording  # type: ignore[method-assign]
    world.weather = Weather(engines=2, spontaneous_aborts=0.05)
    for _ in range(2):
        world.engine_up()
    for _ in range(400):
        world.random_event()
        while world.random.random() < 0.9 and "aborted" in world.moves():
            world.aborted()
    return record


def in_bulk(events: list[ev.Event]) -> list[ev.Event]:
    """Report requests that end directly one after the other in one event."""
    out: list[ev.Event] = []
    ended: list[tuple[int, ...]] = []
    arrived: list[ev.TokensArrived] = []

    def flush() -> None:
        if ended:
            out.append(ev.ManyAborted(tuple(ended)))
            ended.clear()

    for event in events:
        if isinstance(event, ev.Aborted):
            mine = all(report.trajectory_id == event.trajectory_id for report in arrived)
            if not mine:
                flush()
                out += arrived
                arrived = []
            counts = (number for report in arrived for number in (report.count, report.version))
            ended.append((event.trajectory_id, *counts))
            arrived = []
        elif isinstance(event, ev.TokensArrived):
            arrived.append(event)
        else:
            flush()
            out += [*arrived, event]
            arrived = []
    flush()
    return [*out, *arrived]


@pytest.mark.parametrize("name", POLICIES)
def test_many_aborted_equals_single_events(name: str) -> None:
    config = POLICIES[name]
    largest = 0
    for seed in range(4):
        record = recorded_one_by_one(config, seed)
        singly = Scheduler(config, first_step=0, version=PolicyVersion(0, 0))
        wanted = [action for event, _ in record for action in singly.step(event)]
        assert wanted == [action for _, actions in record for action in actions]
        events = in_bulk([event for event, _ in record])
        assert len(events) < len(record)
        at_once = Scheduler(config, first_step=0, version=PolicyVersion(0, 0))
        assert [action for event in events for action in at_once.step(event)] == wanted
        assert at_once.view() == singly.view()
        sizes = [len(event.requests) for event in events if isinstance(event, ev.ManyAborted)]
        largest = max(largest, *sizes)
    assert largest > 3, "too few requests ended together for a meaningful test"


def test_many_aborted_ignores_unknown_and_ended_requests() -> None:
    config = preset("copris")
    scheduler = Scheduler(config, first_step=0, version=PolicyVersion(0, 0))
    before = scheduler.view()
    assert scheduler.step(ev.ManyAborted(((99, 5, 0), (98,)))) == []
    assert scheduler.view() == before
