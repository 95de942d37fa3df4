"""Tests of schedules of episodes: rules for any order of events, requests, drains, failures,
affinity."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason, PolicyVersion
from tests.scheduler.episodes import EpisodeWeather, EpisodeWorld
from tests.scheduler.policies import PRESETS, composed, preset, presets
from tests.scheduler.world import play

V0 = PolicyVersion(0, 0)
weathers = st.builds(
    EpisodeWeather,
    engines=st.integers(1, 3),
    max_running=st.sampled_from([None, None, 1, 3]),
    engine_failures=st.sampled_from([0.0, 0.02]),
    spontaneous_aborts=st.sampled_from([0.0, 0.1]),
    refusals=st.sampled_from([0.0, 0.0, 0.02]),
    scorer_failures=st.sampled_from([0.0, 0.1]),
    regenerate=st.booleans(),
    crashes=st.sampled_from([0.0, 0.01]),
    source=st.sampled_from([None, None, 10]),
    finish=st.sampled_from([0.1, 0.3, 0.6]),
    environment_failures=st.sampled_from([0.0, 0.1]),
    done=st.sampled_from([0.2, 0.6]),
    tools=st.sampled_from([0.0, 0.9]),
)
relaxed = settings(suppress_health_check=list(HealthCheck), derandomize=True, deadline=None)


@settings(relaxed, max_examples=120)
@given(
    st.one_of(presets(), composed()),
    weathers,
    st.integers(0, 2**32),
    st.sampled_from(["auto", 1, 7]),
)
def test_episode_rules_hold_for_any_order_of_events(
    config: ScheduleConfig, weather: EpisodeWeather, seed: int, open_episodes: int | str
) -> None:
    changed = config.model_copy(update={"open_episodes": open_episodes})
    play(EpisodeWorld(changed, weather, seed), events=120, steps=2)


@pytest.mark.slow
@pytest.mark.one_core
@settings(relaxed, max_examples=2000)
@given(st.one_of(presets(), composed()), weathers, st.integers(0, 2**32))
def test_episode_rules_hold_in_thousands_of_random_worlds(
    config: ScheduleConfig, weather: EpisodeWeather, seed: int
) -> None:
    play(EpisodeWorld(config, weather, seed), events=120, steps=2)


@pytest.mark.parametrize("name", PRESETS)
def test_episode_rules_hold_in_long_runs_with_all_failures_at_once(name: str) -> None:
    weather = EpisodeWeather(
        engines=3,
        engine_failures=0.01,
        spontaneous_aborts=0.05,
        scorer_failures=0.03,
        environment_failures=0.05,
        crashes=0.005,
        tools=0.5,
    )
    for seed in range(5):
        world = EpisodeWorld(preset(name), weather, seed)
        play(world, events=600, steps=3)
        assert world.steps_done >= 3


@pytest.mark.parametrize("on_stale", ["wait", "drop", "restart", "mask"])
def test_lag_bound_holds_when_environments_are_slow(on_stale: str) -> None:
    for seed in range(5):
        config = preset("async", max_async_level=1, on_stale=on_stale)
        play(EpisodeWorld(config, EpisodeWeather(crashes=0.01, tools=0.95), seed), 300, 3)


def scheduler(name: str = "copris", **changes: Any) -> Scheduler:
    opened = {"open_episodes": changes.pop("open_episodes", "auto")}
    config = preset(name, **changes).model_copy(update=opened)
    return Scheduler(config, first_step=0, version=V0)


def engine(name: str, kv: int = 1000) -> ev.EngineUp:
    return ev.EngineUp(name, V0, kv)


def begun(scheduler: Scheduler, groups: int) -> list[ev.Action]:
    """Return a script with one engine and requested groups of two."""
    scheduler.step(engine("a"))
    specs = [ev.GroupSpec(g, (2 * g, 2 * g + 1), 0) for g in range(groups)]
    return scheduler.step(ev.PromptsAvailable(tuple(specs)))


def test_failed_episode_restarts_and_then_its_group_is_dropped() -> None:
    s = scheduler(max_regenerations=1, open_episodes=2)
    begun(s, 1)
    assert s.step(ev.EnvironmentFailed(0, True)) == [ev.Restart(0), ev.StartEpisode(0)]
    s.step(ev.EnvironmentReady(0, 4))
    s.step(ev.TurnEnded(0))
    drops = [ev.Drop(i, DropReason.ENVIRONMENT) for i in (0, 1)]
    assert s.step(ev.EnvironmentFailed(0, True))[:2] == drops
    assert s.view().open_episodes == 0
    assert s.view().regenerated == 1
    assert s.step(ev.EnvironmentReady(1, 4)) == [], "a late reply"


def test_next_turn_prefers_the_engine_of_the_last_turn() -> None:
    s = scheduler(concurrency=4)
    s.step(engine("a"))
    s.step(engine("b"))
    specs = tuple(ev.GroupSpec(g, (2 * g, 2 * g + 1), 0) for g in range(2))
    s.step(ev.PromptsAvailable(specs))
    assert s.step(ev.EnvironmentReady(0, 50)) == [ev.Submit(0, "a", False)]
    assert s.step(ev.EnvironmentReady(2, 50)) == [ev.Submit(2, "b", False)]
    s.step(ev.TokensArrived(0, 10, 0))
    s.step(ev.TurnEnded(0))
    s.step(ev.EnvironmentReady(1, 30))  # The turn runs on engine a, which is empty now.
    assert s.step(ev.EnvironmentReady(0, 70)) == [ev.Submit(0, "a", True)]
    s.step(ev.TokensArrived(0, 10, 0))
    s.step(ev.TurnEnded(0))
    s.step(ev.TokensArrived(1, 500, 0))
    assert s.step(ev.EnvironmentReady(0, 90)) == [ev.Submit(0, "b", True)], "a carries too much"


def test_next_turn_has_no_preferred_engine_after_a_weight_update() -> None:
    s = scheduler("pipeline", concurrency=4)
    s.step(engine("a"))
    s.step(engine("b"))
    s.step(ev.PromptsAvailable((ev.GroupSpec(0, (0, 1), 0),)))
    s.step(ev.EnvironmentReady(0, 50))
    s.step(ev.TokensArrived(0, 10, 0))
    s.step(ev.TurnEnded(0))
    s.step(ev.EnvironmentReady(1, 30))
    s.step(ev.UpdateRequested(1))
    s.step(ev.WeightsPublished(PolicyVersion(0, 1)))
    assert s.step(ev.EnvironmentReady(0, 70)) == [ev.Submit(0, "b", True)]
