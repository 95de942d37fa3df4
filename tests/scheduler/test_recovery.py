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
from megatron_async.trajectory.types import PolicyVersion, TrajectoryState
from tests.scheduler.policies import composed, presets
from tests.scheduler.world import Weather, World


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
