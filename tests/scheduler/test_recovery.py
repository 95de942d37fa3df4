"""Groups found in the store at a resume: all are known before anything is decided about them."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_async.config import build_config
from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState
from tests.scheduler.policies import composed, preset, presets
from tests.scheduler.script import Script
from tests.scheduler.world import Weather, World

STEP = 5


def scored(group: int, version: int) -> ev.RecoveredGroup:
    """A complete group of one member, written by `version`."""
    known = ev.RecoveredTrajectory(group, TrajectoryState.SCORED, 9, version, 1.0, version)
    return ev.RecoveredGroup(ev.GroupSpec(group, (group,), 5), (known,))


def resumed(config: ScheduleConfig) -> Scheduler:
    return Scheduler(config, first_step=STEP, version=PolicyVersion(1, STEP))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_an_older_group_is_batched_first_wherever_it_stands(order: tuple[int, int]) -> None:
    """It fits into the next batch and into no later one."""
    config = preset("async", groups_per_batch=1, group_size=2, concurrency=4)
    groups = [scored(0, STEP), scored(1, STEP - 2)]
    scheduler = resumed(config)
    emitted = scheduler.step(ev.Recovered(tuple(groups[i] for i in order)))
    emitted += scheduler.step(ev.BatchTaken(STEP))
    assert [action for action in emitted if isinstance(action, ev.EmitBatch | ev.Drop)] == [
        ev.EmitBatch(STEP, (1,)),
        ev.EmitBatch(STEP + 1, (0,)),
    ]


def found_after_a_crash(config: ScheduleConfig, seed: int) -> tuple[int, list[ev.RecoveredGroup]]:
    """What a random run leaves in the store, and the step that it resumes at."""
    world = World(config, Weather(scorer_failures=0.05, slow_scores=0.5), seed)
    for _ in range(150):
        world.random_event()
    step = max(0, world.steps_done - world.random.randrange(2))
    return step, world._stored(step)


@settings(suppress_health_check=list(HealthCheck), derandomize=True, max_examples=60)
@given(st.one_of(presets(), composed()), st.integers(0, 2**32), st.booleans())
def test_the_order_in_which_groups_are_found_changes_nothing(
    config: ScheduleConfig, seed: int, engine_first: bool
) -> None:
    step, found = found_after_a_crash(config, seed)
    up = ev.EngineUp("a", PolicyVersion(1, step), 10_000)
    outcomes: list[Any] = []
    for _ in range(3):
        random.Random(len(outcomes)).shuffle(found)
        events: list[ev.Event] = [ev.Recovered(tuple(found)), up]
        scheduler = Scheduler(config, first_step=step, version=PolicyVersion(1, step))
        emitted = [scheduler.step(event) for event in (events[::-1] if engine_first else events)]
        outcomes.append((emitted, scheduler.view()))
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("preset", ["sync", "copris", "pipeline"])
def test_recovered_work_is_spread_over_engines_that_come_up_at_once(preset: str) -> None:
    """One engine after the other would give all of it to the first."""
    version = PolicyVersion(1, 0)
    settings = {"preset": preset, "groups_per_batch": 8, "group_size": 4, "concurrency": 32}
    config = build_config({"schedule": settings}).resolved_schedule
    scheduler = Scheduler(config, first_step=0, version=version)
    groups = tuple(
        ev.RecoveredGroup(
            ev.GroupSpec(group, ids, 6),
            tuple(
                ev.RecoveredTrajectory(i, TrajectoryState.PARTIAL, 100 + i, 0, None, 0) for i in ids
            ),
        )
        for group in range(8)
        for ids in [tuple(range(4 * group, 4 * group + 4))]
    )
    assert not [a for a in scheduler.step(ev.Recovered(groups)) if isinstance(a, ev.Submit)]
    up = ev.EnginesUp(tuple(ev.EngineUp(name, version, 1 << 24) for name in "abcd"))
    submitted = Counter(a.engine_id for a in scheduler.step(up) if isinstance(a, ev.Submit))
    assert submitted == dict.fromkeys("abcd", 8)


class TestOneFailedMember:
    """Its scorer failed: the setting decides whether it alone, or its group, is lost."""

    def test_it_alone_is_generated_again_and_its_group_waits(self) -> None:
        run = Script("copris", concurrency=4)
        run.prompts(2)
        run.finish(0, 10, 11)
        run.tokens(1)
        run.send(ev.Finished(1))
        emitted = run.send(ev.RewardReady(1, None, regenerate=True))
        assert emitted[:2] == [ev.Restart(1), ev.Submit(1, "a", False)]
        view = run.scheduler.view()
        assert (view.restarted, view.regenerated, view.wasted_tokens) == (1, 1, 5)
        assert view.dropped == {}
        run.finish(1)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(0, (0, 1))]

    def test_without_the_setting_its_group_is_dropped(self) -> None:
        run = Script("copris")
        run.prompts(1)
        run.finish(0)
        run.send(ev.Finished(1), ev.RewardReady(1, None))
        assert [action.trajectory_id for action in run.of(ev.Drop)] == [0, 1]

    @pytest.mark.parametrize("times", [0, 1, 3])
    def test_a_member_that_fails_again_and_again_costs_its_group(self, times: int) -> None:
        run = Script("copris", max_regenerations=times)
        run.prompts(1)
        run.finish(0)
        for _ in range(times):
            run.send(ev.Finished(1), ev.RewardReady(1, None, regenerate=True))
            assert run.of(ev.Restart) == [ev.Restart(1)] and not run.of(ev.Drop)
        run.send(ev.Finished(1), ev.RewardReady(1, None, regenerate=True))
        assert run.of(ev.Drop) == [ev.Drop(t, DropReason.SCORER) for t in (0, 1)]

    def test_its_group_is_as_old_as_the_members_that_stay(self) -> None:
        """The first response would be stale in the batch after the next; the second one is not."""
        run = Script("async", groups_per_batch=1, concurrency=4, max_async_level=1)
        run.prompts(2)
        run.tokens(0)
        run.finish(10, 11)
        run.send(ev.BatchTaken(0), ev.UpdateRequested(1))
        run.publish(1)
        run.tokens(1)
        run.send(ev.Finished(0), ev.RewardReady(0, None, regenerate=True))
        run.tokens(0)
        run.prompts(1)
        run.finish(20, 21)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (2,))]
        run.send(ev.BatchTaken(1), ev.UpdateRequested(2))
        run.publish(2)
        run.finish(0, 1)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(2, (0,))]
