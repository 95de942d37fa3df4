"""Tests the world of `world.py` as a Hypothesis state machine, which shrinks failing event orders.

Each rule of the machine is one event that may happen. The oracle checks every event. At the end
there are no more failures, and the trainer must make two more steps.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from megatron_async.config.schedule import ScheduleConfig
from tests.scheduler.policies import composed, preset, presets
from tests.scheduler.world import Weather, World, play


class Machine(RuleBasedStateMachine):
    """Rules for all moves of the world; the world's own random numbers determine sizes."""

    world: World

    @initialize(
        config=st.one_of(presets(), composed()),
        seed=st.integers(0, 1000),
        engines=st.integers(1, 3),
        source=st.sampled_from([None, 6]),
    )
    def begin(self, config: ScheduleConfig, seed: int, engines: int, source: int | None) -> None:
        weather = Weather(engines=engines, scorer_failures=0.05, source=source)
        self.world = World(config, weather, seed)

    def can(self, move: str) -> bool:
        return hasattr(self, "world") and move in self.world.moves()

    @precondition(lambda self: self.can("tokens"))
    @rule()
    def tokens(self) -> None:
        self.world.tokens()

    @precondition(lambda self: self.can("finish"))
    @rule()
    def finish(self) -> None:
        self.world.finish()

    @precondition(lambda self: self.can("aborted"))
    @rule()
    def aborted(self) -> None:
        self.world.aborted()

    @precondition(lambda self: self.can("score"))
    @rule()
    def score(self) -> None:
        self.world.score()

    @precondition(lambda self: self.can("prompts"))
    @rule()
    def prompts(self) -> None:
        self.world.prompts()

    @precondition(lambda self: self.can("take"))
    @rule()
    def take(self) -> None:
        self.world.take()

    @precondition(lambda self: self.can("update"))
    @rule()
    def update(self) -> None:
        self.world.update()

    @precondition(lambda self: self.can("publish"))
    @rule()
    def publish(self) -> None:
        self.world.publish()

    @precondition(lambda self: self.can("engine_up"))
    @rule()
    def engine_up(self) -> None:
        self.world.engine_up()

    @precondition(lambda self: self.can("synchronize"))
    @rule()
    def synchronize(self) -> None:
        self.world.synchronize()

    @precondition(lambda self: hasattr(self, "world") and bool(self.world.engine_versions))
    @rule()
    def engine_down(self) -> None:
        self.world.engine_down(next(iter(self.world.engine_versions)))

    @precondition(lambda self: hasattr(self, "world"))
    @rule()
    def crash(self) -> None:
        self.world.crash()

    @precondition(lambda self: hasattr(self, "world"))
    @rule(count=st.integers(1, 30))
    def more(self, count: int) -> None:
        """Make ordinary progress, so that the test reaches deep states."""
        for _ in range(count):
            self.world.random_event()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            play(self.world, events=0, steps=2)


TestAnyOrder = pytest.mark.one_core(pytest.mark.slow(Machine.TestCase))
TestAnyOrder.settings = settings(
    max_examples=100,
    stateful_step_count=25,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


def test_state_machine_has_a_rule_for_every_move_of_the_world() -> None:
    """Each new move of the world needs a rule in the state machine."""
    world = World(preset("pipeline"), Weather(engine_failures=0.03), seed=2)
    seen: set[str] = set()
    for _ in range(600):
        seen |= set(world.moves())
        world.random_event()
    assert seen <= set(dir(Machine))
