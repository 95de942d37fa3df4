"""Tests of thousands of random event orders, checked by an oracle that sees events and actions
only.

The worlds have these failures: engines that die and come up again (also with an old version),
requests that an engine refuses or ends by itself, aborts that arrive after the end of a response,
tokens that are reported after a weight update, scorers that fail, tasks that are exhausted, and
crashes of everything with a resume from one of the last checkpoints. After each run there are no
more failures, and the trainer must make three more steps.
"""

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
from tests.scheduler.episodes import EpisodeWeather, EpisodeWorld
from tests.scheduler.policies import PRESETS, composed, preset, presets
from tests.scheduler.world import Weather, World, play

weathers = st.builds(
    Weather,
    engines=st.integers(1, 3),
    max_running=st.sampled_from([None, None, 1, 3]),
    engine_failures=st.sampled_from([0.0, 0.02]),
    spontaneous_aborts=st.sampled_from([0.0, 0.1]),
    refusals=st.sampled_from([0.0, 0.0, 0.02]),
    scorer_failures=st.sampled_from([0.0, 0.0, 0.1]),
    regenerate=st.booleans(),
    slow_scores=st.sampled_from([0.0, 0.0, 0.9]),
    crashes=st.sampled_from([0.0, 0.01]),
    source=st.sampled_from([None, None, 10]),
    finish=st.sampled_from([0.1, 0.3, 0.6]),
)
seeds = st.integers(0, 2**32)
relaxed = settings(suppress_health_check=list(HealthCheck), derandomize=True)


@pytest.mark.slow
@pytest.mark.one_core
@settings(relaxed, max_examples=1500)
@given(presets(), weathers, seeds)
def test_presets_keep_every_rule_for_any_order_of_events(
    config: ScheduleConfig, weather: Weather, seed: int
) -> None:
    play(World(config, weather, seed), events=120, steps=2)


@pytest.mark.slow
@pytest.mark.one_core
@settings(relaxed, max_examples=2000)
@given(composed(), weathers, seeds)
def test_any_composed_policy_keeps_every_rule(
    config: ScheduleConfig, weather: Weather, seed: int
) -> None:
    play(World(config, weather, seed), events=120, steps=2)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_keep_every_rule_in_long_runs_with_all_failures_at_once(name: str) -> None:
    weather = Weather(
        engines=3, engine_failures=0.01, spontaneous_aborts=0.05, scorer_failures=0.03
    )
    for seed in range(8):
        world = World(preset(name), weather, seed)
        play(world, events=600, steps=3)
        assert world.steps_done >= 3


@pytest.mark.parametrize("overflow", ["block", "drop_oldest"])
@pytest.mark.parametrize("name", ["copris", "pipeline"])
def test_slow_scores_delay_new_groups_but_no_batch(name: str, overflow: str) -> None:
    for ring in (1, 2):
        config = preset(name, max_waiting_batches=ring, overflow=overflow)
        world = World(config, Weather(slow_scores=0.97, engine_failures=0.01), seed=ring)
        play(world, events=600, steps=3)
        assert world.held_back > 20


@pytest.mark.parametrize("k", [0, 1, 2, 3])
@pytest.mark.parametrize("on_stale", ["wait", "drop", "restart", "mask"])
def test_lag_bound_holds_through_crashes(k: int, on_stale: str) -> None:
    for seed in range(6):
        config = preset("async", max_async_level=k, on_stale=on_stale)
        play(World(config, Weather(crashes=0.02, engine_failures=0.01), seed), 250, 3)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("seed", range(3))
def test_run_continues_after_any_number_of_refused_requests(name: str, seed: int) -> None:
    weather = Weather(refusals=0.1, scorer_failures=0.05, engine_failures=0.01, crashes=0.005)
    play(World(preset(name), weather, seed), 250, 3)


@pytest.mark.parametrize("name", PRESETS)
def test_same_events_cause_same_actions(name: str) -> None:
    def run() -> list[str]:
        world = World(preset(name), Weather(engine_failures=0.02), seed=5)
        emitted = []
        for _ in range(300):
            world.random_event()
            emitted.append(repr(world.scheduler.view()))
        return emitted

    assert run() == run()


@pytest.mark.parametrize("episodes", [False, True])
def test_oracle_fails_when_an_action_is_lost(episodes: bool) -> None:
    """Negative control: the oracle must notice a world in which one action is lost."""
    caught, copris = 0, preset("copris")
    for seed in range(20):
        weather = EpisodeWeather()
        world = EpisodeWorld(copris, weather, seed) if episodes else World(copris, weather, seed)
        step, chance = world.scheduler.step, random.Random(seed)

        def lossy(event: ev.Event, step: Any = step, chance: Any = chance) -> list[ev.Action]:
            actions: list[ev.Action] = step(event)
            return actions[:-1] if actions and chance.random() < 0.05 else actions

        world.scheduler.step = lossy  # type: ignore[method-assign]
        try:
            play(world, events=300, steps=2)
        except AssertionError:
            caught += 1
    assert caught == 20


def found_after_a_crash(config: ScheduleConfig, seed: int) -> tuple[int, list[ev.RecoveredGroup]]:
    """Return the groups that a random run leaves in the store, and the step at which it resumes."""
    world = World(config, Weather(scorer_failures=0.05, slow_scores=0.5), seed)
    for _ in range(150):
        world.random_event()
    step = max(0, world.steps_done - world.random.randrange(2))
    return step, world._stored(step)


@settings(suppress_health_check=list(HealthCheck), derandomize=True, max_examples=60)
@given(st.one_of(presets(), composed()), st.integers(0, 2**32), st.booleans())
def test_order_of_recovered_groups_changes_nothing(
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
def test_recovered_trajectories_are_spread_over_engines_that_come_up(preset: str) -> None:
    """If engines came up one by one, the first would get all trajectories."""
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
