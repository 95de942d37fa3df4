"""Tests that a scheduler that is restored from a snapshot continues exactly as the saved one."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler import Scheduler
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.snapshot import freeze, thaw
from megatron_async.trajectory.types import PolicyVersion
from tests.scheduler.episodes import EpisodeWeather, EpisodeWorld
from tests.scheduler.policies import PRESETS, composed, preset, presets
from tests.scheduler.world import Weather, World

WEATHER = Weather(
    engine_failures=0.02,
    spontaneous_aborts=0.05,
    scorer_failures=0.05,
    regenerate=True,
    slow_scores=0.5,
    crashes=0.01,
)


def new(config: ScheduleConfig) -> Scheduler:
    return Scheduler(config, first_step=0, version=PolicyVersion(0, 0))


def copy(scheduler: Scheduler, config: ScheduleConfig) -> Scheduler:
    """Return the snapshot after a conversion to JSON text and back."""
    text = json.dumps(freeze(scheduler))
    again = new(config)
    thaw(json.loads(text), again)
    assert freeze(again) == json.loads(text)
    return again


class Twins(World):
    """Sends every event to the scheduler and to a copy, which is replaced by a new snapshot
    sometimes."""

    def start(self, step: int, version: PolicyVersion) -> None:
        super().start(step, version)
        self.twin = copy(self.scheduler, self.config)

    def send(self, event: ev.Event) -> list[ev.Action]:
        expected = self.twin.step(event)
        actions = super().send(event)
        assert actions == expected
        if self.events % 17 == 0:
            self.twin = copy(self.scheduler, self.config)
        assert self.twin.view() == self.scheduler.view()
        return actions


class EpisodeTwins(Twins, EpisodeWorld): ...


@pytest.mark.parametrize("name", PRESETS)
def test_restored_scheduler_of_episodes_continues_as_the_saved_one(name: str) -> None:
    weather = EpisodeWeather(**vars(WEATHER), environment_failures=0.05)
    world = EpisodeTwins(preset(name), weather, seed=3)
    for _ in range(400):
        world.random_event()


@settings(suppress_health_check=list(HealthCheck), derandomize=True, max_examples=40)
@given(st.one_of(presets(), composed()), st.integers(0, 2**32))
def test_restored_scheduler_continues_as_the_saved_one(config: ScheduleConfig, seed: int) -> None:
    world = Twins(config, WEATHER, seed)
    for _ in range(120):
        world.random_event()


def test_freeze_raises_for_values_outside_the_state() -> None:
    scheduler = new(preset("sync"))
    scheduler._untaken = [object()]  # type: ignore[list-item]
    with pytest.raises(TypeError, match="not part of a scheduler's state"):
        freeze(scheduler)
