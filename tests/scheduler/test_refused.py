"""A request that the engines take for invalid: its group leaves, and nothing else changes."""

from __future__ import annotations

import pytest

from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason
from tests.scheduler.policies import PRESETS, preset
from tests.scheduler.script import Script
from tests.scheduler.world import Weather, World, play


def test_its_group_is_dropped_and_its_slot_is_free() -> None:
    run = Script("copris", concurrency=2, group_size=2, groups_per_batch=1)
    run.prompts(2)
    assert run.submitted() == [0, 1]
    emitted = run.send(ev.Refused(0))
    assert emitted[0] == ev.Drop(0, DropReason.REFUSED)
    assert run.of(ev.Abort) == [ev.Abort(1, "a")]
    assert run.submitted() == [10]
    assert run.send(ev.Aborted(1))[0] == ev.Drop(1, DropReason.REFUSED)
    assert run.submitted() == [11]


def test_members_that_are_refused_too_leave_as_well() -> None:
    run = Script("copris", concurrency=2, group_size=2, groups_per_batch=1)
    run.prompts(1)
    run.send(ev.Refused(0))
    assert run.send(ev.Refused(1))[0] == ev.Drop(1, DropReason.REFUSED)
    assert run.send(ev.Refused(1)) == []  # late news of one that is gone


def test_a_member_that_is_being_scored_leaves_when_its_reward_has_come() -> None:
    run = Script("copris", concurrency=2, group_size=2, groups_per_batch=1)
    run.prompts(1)
    run.send(ev.TokensArrived(0, 5, 0), ev.Finished(0))
    assert run.send(ev.Refused(1))[0] == ev.Drop(1, DropReason.REFUSED)
    assert run.send(ev.RewardReady(0, 1.0))[0] == ev.Drop(0, DropReason.REFUSED)


def test_one_that_was_to_start_again_leaves_with_its_group() -> None:
    """A response that is stale and runs is aborted to be restarted, and refused meanwhile."""
    run = Script(
        "async",
        group_size=2,
        groups_per_batch=1,
        concurrency=8,
        max_async_level=1,
        on_stale="restart",
    )
    run.prompts(2)
    run.tokens(0, 1)
    run.finish(10, 11)
    run.send(ev.BatchTaken(0))
    run.publish(1)
    run.prompts(1)
    run.finish(20, 21)
    run.send(ev.BatchTaken(1))
    run.publish(2)
    run.send(ev.Refused(0), ev.Aborted(1))
    assert [drop for drop in run.of(ev.Drop) if drop.trajectory_id < 2] == [
        ev.Drop(0, DropReason.REFUSED),
        ev.Drop(1, DropReason.REFUSED),
    ]
    assert run.of(ev.Restart) == []


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_goes_on_past_any_number_of_refusals(name: str, seed: int) -> None:
    weather = Weather(refusals=0.1, scorer_failures=0.05, engine_failures=0.01, crashes=0.005)
    play(World(preset(name), weather, seed), 250, 3)
