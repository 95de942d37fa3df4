"""Schedules of episodes: the rules of any order of events, slots, drains, failures, affinity."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState
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
def test_every_rule_holds_in_any_order_of_events(
    config: ScheduleConfig, weather: EpisodeWeather, seed: int, open_episodes: int | str
) -> None:
    changed = config.model_copy(update={"open_episodes": open_episodes})
    play(EpisodeWorld(changed, weather, seed), events=120, steps=2)


@pytest.mark.slow
@pytest.mark.one_core
@settings(relaxed, max_examples=2000)
@given(st.one_of(presets(), composed()), weathers, st.integers(0, 2**32))
def test_so_they_do_in_thousands_of_worlds(
    config: ScheduleConfig, weather: EpisodeWeather, seed: int
) -> None:
    play(EpisodeWorld(config, weather, seed), events=120, steps=2)


@pytest.mark.parametrize("name", PRESETS)
def test_long_runs_with_all_failures_at_once(name: str) -> None:
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
def test_the_lag_bound_holds_with_slow_tools(on_stale: str) -> None:
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
    """An engine, and groups of two that are asked for."""
    scheduler.step(engine("a"))
    specs = [ev.GroupSpec(g, (2 * g, 2 * g + 1), 0) for g in range(groups)]
    return scheduler.step(ev.PromptsAvailable(tuple(specs)))


def test_a_waiting_episode_takes_no_slot() -> None:
    s = scheduler(concurrency=2)
    assert begun(s, 2) == [ev.StartEpisode(i) for i in range(4)]
    assert s.view().in_flight == 0 and s.view().open_episodes == s.view().waiting == 4
    assert s.step(ev.EnvironmentReady(3, 5)) == [ev.Submit(3, "a", False)]
    assert s.step(ev.EnvironmentReady(0, 5)) == [ev.Submit(0, "a", False)]
    assert s.step(ev.EnvironmentReady(1, 5)) == []
    s.step(ev.TokensArrived(3, 4, 0))
    assert s.step(ev.TurnEnded(3)) == [ev.StepEnvironment(3), ev.Submit(1, "a", False)]
    assert s.view().in_flight == 2


def test_open_episodes_bound_what_is_begun_and_an_end_begins_another() -> None:
    s = scheduler(open_episodes=3)
    assert begun(s, 2) == [ev.StartEpisode(i) for i in range(3)]
    s.step(ev.EnvironmentReady(0, 5))
    s.step(ev.TurnEnded(0))
    assert s.step(ev.EpisodeEnded(0)) == [ev.Score(0), ev.StartEpisode(3)]


def test_a_drain_plays_begun_episodes_to_their_end_and_begins_none() -> None:
    s = scheduler("sync", groups_per_batch=1, concurrency=8, oversample=2.0)
    assert len(begun(s, 2)) == 4
    for i in range(4):
        s.step(ev.EnvironmentReady(i, 5))
        s.step(ev.TokensArrived(i, 3, 0))
        s.step(ev.TurnEnded(i))
    for i in (0, 1):
        s.step(ev.EpisodeEnded(i))
        assert s.step(ev.RewardReady(i, float(i))) == [], "two episodes are open"
    assert s.step(ev.EnvironmentReady(2, 9)) == [ev.Submit(2, "a", True)], "it goes on"
    s.step(ev.TurnEnded(2))
    assert s.step(ev.EpisodeEnded(2)) == [ev.Score(2)]
    assert s.step(ev.EpisodeEnded(3)) == [ev.Score(3), ev.EmitBatch(0, (0,))]


def test_an_abort_keeps_turns_and_steps_under_way_finish() -> None:
    s = scheduler("copris", groups_per_batch=1)
    begun(s, 2)
    for i in (0, 1, 2):
        s.step(ev.EnvironmentReady(i, 5))
        s.step(ev.TokensArrived(i, 3, 0))
    for i in (0, 1):
        s.step(ev.TurnEnded(i))
        s.step(ev.EpisodeEnded(i))
    s.step(ev.RewardReady(0, 0.0))
    assert s.step(ev.RewardReady(1, 1.0)) == [ev.EmitBatch(0, (0,)), ev.Abort(2, "a")]
    assert s.step(ev.Aborted(2)) == []
    assert s.step(ev.EnvironmentReady(3, 5)) == [], "the trainer works"
    s.step(ev.BatchTaken(0))
    s.step(ev.UpdateRequested(1))
    actions = s.step(ev.WeightsPublished(PolicyVersion(0, 1)))
    assert [a for a in actions if isinstance(a, ev.Submit)] == [
        ev.Submit(2, "a", True),
        ev.Submit(3, "a", False),
    ]


def test_a_failed_member_starts_again_alone_and_then_its_group_leaves() -> None:
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


def test_a_waiting_member_of_a_group_that_leaves_goes_at_once() -> None:
    s = scheduler()
    begun(s, 1)
    s.step(ev.EnvironmentReady(0, 4))
    assert s.step(ev.Refused(0))[:2] == [ev.Drop(i, DropReason.REFUSED) for i in (0, 1)]


def test_the_next_turn_goes_to_the_engine_of_the_last_one() -> None:
    s = scheduler(concurrency=4)
    s.step(engine("a"))
    s.step(engine("b"))
    specs = tuple(ev.GroupSpec(g, (2 * g, 2 * g + 1), 0) for g in range(2))
    s.step(ev.PromptsAvailable(specs))
    assert s.step(ev.EnvironmentReady(0, 50)) == [ev.Submit(0, "a", False)]
    assert s.step(ev.EnvironmentReady(2, 50)) == [ev.Submit(2, "b", False)]
    s.step(ev.TokensArrived(0, 10, 0))
    s.step(ev.TurnEnded(0))
    s.step(ev.EnvironmentReady(1, 30))  # on a, which is empty now
    assert s.step(ev.EnvironmentReady(0, 70)) == [ev.Submit(0, "a", True)]
    s.step(ev.TokensArrived(0, 10, 0))
    s.step(ev.TurnEnded(0))
    s.step(ev.TokensArrived(1, 500, 0))
    assert s.step(ev.EnvironmentReady(0, 90)) == [ev.Submit(0, "b", True)], "a carries too much"


def test_after_an_update_the_engine_of_the_last_turn_is_one_like_the_others() -> None:
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


def test_a_resume_steps_who_waits_and_submits_who_has_a_turn() -> None:
    s = scheduler()
    s.step(engine("a"))
    states = (TrajectoryState.WAITING, TrajectoryState.PARTIAL)
    members = [ev.RecoveredTrajectory(i, state, 4, 0, None, 0) for i, state in enumerate(states)]
    fresh = [
        ev.RecoveredTrajectory(2, TrajectoryState.PARTIAL, 0, None, None),
        ev.RecoveredTrajectory(3, TrajectoryState.PENDING, 0, None, None),
    ]
    groups = (
        ev.RecoveredGroup(ev.GroupSpec(0, (0, 1), 0), tuple(members)),
        ev.RecoveredGroup(ev.GroupSpec(1, (2, 3), 0), tuple(fresh)),
    )
    actions = s.step(ev.RecoveredEpisodes(groups, ((0, 9), (1, 9), (2, 5))))
    assert actions[:4] == [
        ev.StepEnvironment(0),
        ev.Submit(1, "a", True),
        ev.Submit(2, "a", False),
        ev.StartEpisode(3),
    ]
    assert s.view().open_episodes == 4


def test_the_oracle_sees_a_scheduler_that_loses_actions() -> None:
    caught = 0
    for seed in range(15):
        world = EpisodeWorld(preset("copris"), EpisodeWeather(), seed)
        step, random = world.scheduler.step, world.random

        def lossy(event: ev.Event, step: Any = step, random: Any = random) -> list[ev.Action]:
            actions = step(event)
            return actions[:-1] if actions and random.random() < 0.05 else actions

        world.scheduler.step = lossy  # type: ignore[method-assign]
        try:
            play(world, events=300, steps=2)
        except AssertionError:
            caught += 1
    assert caught == 15
