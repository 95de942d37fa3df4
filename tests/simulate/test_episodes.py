"""Tests of simulated episodes: every preset runs tools, slots stay full, and contexts stay in the
cache."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config.load import build_simulation, merge
from megatron_async.config.simulate import LengthConfig, SimulateConfig, SimulatedEpisodeConfig
from megatron_async.scheduler import events as ev
from megatron_async.scheduler.record import Recorder, read_record, replay
from megatron_async.simulate.build import build_world, simulate
from megatron_async.simulate.engine import Engine, SimulatedRequest
from megatron_async.simulate.episodes import EpisodeSource
from megatron_async.simulate.planner import make_plan
from megatron_async.trajectory.types import PolicyVersion
from tests.simulate.test_engine import PREFILL, Costs
from tests.simulate.test_world import PRESETS, SMALL

TOOLS: dict[str, Any] = {"turns": 4, "tool_seconds": 0.5, "observation_tokens": 30}


def settings(preset: str, **changes: Any) -> dict[str, Any]:
    schedule = {"preset": preset, **({"updates_per_batch": 3} if preset == "rapid" else {})}
    own = {"schedule": schedule, "simulate": {"episode": TOOLS}}
    return merge(merge(SMALL, own), changes)


@pytest.mark.parametrize("preset", PRESETS)
def test_episodes_with_tools_run_and_replay_with_every_preset(preset: str, tmp_path: Path) -> None:
    config = build_simulation(settings(preset))
    record = io.StringIO()
    schedule = config.schedule.model_copy(update={"open_episodes": "auto"})
    recorder = Recorder(record, schedule, first_step=0, version=PolicyVersion(0, 0))
    world = build_world(config, recorder)
    world.run(8)
    assert [row.step for row in world.statistics.rows][:8] == list(range(8))
    (path := tmp_path / "0.jsonl").write_text(record.getvalue())
    assert replay(path) is None
    events = [exchange.event for exchange in read_record(path)[1]]
    turns = sum(isinstance(event, ev.TurnEnded) for event in events)
    ends = sum(isinstance(event, ev.EpisodeEnded) for event in events)
    assert turns > 2 * ends > 100
    lags = world.statistics.lags
    assert max(lag.lag_max for lag in lags) == 0 or preset not in ("sync", "rapid")
    assert max(lag.lag_max for lag in lags) <= 2 or preset != "async"


def busy(open_episodes: int) -> float:
    """Return the share of 64 slots in use when tools take as long as turns (200 tokens at 3.5 ms
    each).

    The trainer is so fast that generation never waits for it.
    """
    episode = {**TOOLS, "turns": 8, "spread": "constant", "tool_seconds": 0.7}
    changes = {
        "engines": {"count": 1},
        "schedule": {"concurrency": 64, "open_episodes": open_episodes, "groups_per_batch": 8},
        "simulate": {
            "episode": episode,
            "lengths": {"median": 200, "sigma": 0.3},
            "trainer_seconds_per_token": 1e-6,
            "trainer_seconds_per_update": 0.01,
            "weight_update_seconds": 0.01,
            "efficiency": {"batch_overhead_seconds": 0.0},
        },
    }
    summary = simulate(build_simulation(settings("pipeline", **changes)))
    return summary.slots_busy * (1 - summary.engine_idle)


def test_slots_stay_busy_when_more_episodes_are_open_than_slots() -> None:
    assert busy(256) >= 0.9
    assert busy(64) < 0.65


def source(**changes: Any) -> EpisodeSource:
    drawn = SimulatedEpisodeConfig(**{**TOOLS, **changes})
    return EpisodeSource(drawn, LengthConfig(median=50), group_size=3, longest=90, seed=1)


def test_episode_source_repeats_when_seed_and_group_are_equal() -> None:
    first = source()
    groups = [first.group(number) for number in (5, 0, 9)]
    assert [source().group(number) for number in (5, 0, 9)] == groups
    counts = [len(plan) for number in range(600) for plan in first.group(number)]
    assert sum(counts) / len(counts) == pytest.approx(4, rel=0.1)
    assert max(counts) <= 32
    turns = [turn for number in range(50) for plan in first.group(number) for turn in plan]
    assert {turn.observation for turn in turns} == {30}
    assert {turn.seconds for turn in turns} == {0.5}
    assert all(1 <= turn.tokens <= 90 for turn in turns)
    constant = [len(p) for p in source(spread="constant", turns=3, tool_sigma=1.0).group(0)]
    assert constant == [3, 3, 3]


def turn(before: int, unseen: int, remaining: int = 10) -> SimulatedRequest:
    return SimulatedRequest(0, 0, 100, before, remaining, unseen=unseen)


def prefilled(engine: Engine, request: SimulatedRequest) -> int:
    """Run a request to its end; return the number of tokens that were prefilled when the engine
    admitted it."""
    before = engine.counters.prefilled
    engine.submit(request)
    engine.admit()
    now = engine.forecast()
    while now is not None:
        engine.advance(now)
        for done in engine.completed():
            engine.take_tokens(done)
            engine.cache_turn(done)
        now = engine.forecast()
    return engine.counters.prefilled - before


def test_next_turn_prefills_only_tokens_missing_from_cache() -> None:
    engine = Engine("e", Costs(), SimulateConfig(admission_reserve_tokens=0), None)
    assert prefilled(engine, turn(30, 30)) == 130
    assert prefilled(engine, turn(60, 20)) == 20, "prompt and 30 + 10 tokens are in the cache"
    assert engine.counters.resumed_prefill == 0
    engine.load(1)
    assert prefilled(engine, turn(90, 20)) == 190, "older weights computed the cache"
    assert engine.counters.resumed_prefill == 170
    assert engine.stall == 0 and PREFILL > 0


def test_cached_turn_is_evicted_when_running_requests_need_space() -> None:
    rules = SimulateConfig(admission_reserve_tokens=0, retract_steps=1)
    engine = Engine("e", Costs(300), rules, None)
    prefilled(engine, turn(30, 30))
    other = SimulatedRequest(1, 1, 100, 120, 60, unseen=120)
    prefilled(engine, other)
    assert prefilled(engine, turn(60, 20)) == 160, "the other request needed the space"


def test_plan_accounts_for_tools_when_episodes_use_them() -> None:
    changes = {"simulate": {"gpus": 4}}
    best = make_plan(settings("pipeline", **changes), top=1).candidates[0]
    plain = make_plan(merge(SMALL, {"schedule": {"preset": "pipeline"}, **changes}), top=1)
    assert best.summary is not None and plain.candidates[0].summary is not None
    assert best.summary.step_seconds > plain.candidates[0].summary.step_seconds
    assert best.engines.seconds > 2 * plain.candidates[0].engines.seconds
