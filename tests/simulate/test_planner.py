"""Tests of the planner: its plans fit into memory, and its estimates agree with the simulation."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from megatron_async.config import build_config
from megatron_async.config.load import merge, parse_override
from megatron_async.config.recipes import SCHEDULE_PRESETS
from megatron_async.config.simulate import LengthConfig, SimulatedRewardConfig
from megatron_async.errors import UserError
from megatron_async.simulate.build import simulate
from megatron_async.simulate.lengths import GroupSource
from megatron_async.simulate.plan_show import plan_yaml
from megatron_async.simulate.planner import make_plan

SEVEN: dict[str, Any] = {
    "sampling": {"max_new_tokens": 4096},
    "schedule": {"preset": "pipeline", "groups_per_batch": 32, "group_size": 8},
    "simulate": {
        "model": "qwen2.5-7b",
        "gpu": {"name": "H100"},
        "gpus": 16,
        "lengths": {"median": 1500, "sigma": 0.7},
        "steps": 10,
        "warmup_steps": 4,
    },
}


def test_plan_uses_every_gpu_and_fits_into_memory() -> None:
    plan = make_plan(SEVEN, 3)
    assert len(plan.candidates) == 3
    for candidate in plan.candidates:
        config = candidate.config
        assert config.parallel.ranks + config.engines.count * config.engines.tensor == 16
        assert candidate.trainer.memory <= 0.8 * 80e9
        assert candidate.summary == simulate(config)
    rates = [c.summary.tokens_per_second for c in plan.candidates if c.summary]
    assert max(rates) <= rates[0] / 0.98 and rates[1:] == sorted(rates[1:], reverse=True)


def test_plan_estimate_is_near_the_simulated_step_time() -> None:
    settings = merge(SEVEN, {"simulate": {"steps": 40, "warmup_steps": 20}})
    best = make_plan(settings, 1).candidates[0]
    assert best.summary is not None
    assert best.step_seconds == pytest.approx(best.summary.step_seconds, rel=0.25)


def test_plan_concurrency_respects_the_lag_bound() -> None:
    settings = merge(
        SEVEN,
        {
            "schedule": {"preset": "async", "max_async_level": 1, "groups_per_batch": 8},
            "simulate": {"steps": 6},
        },
    )
    for candidate in make_plan(settings, 2).candidates:
        assert candidate.engines.concurrency <= 8 * 8 * 2 + candidate.engines.count


def test_plan_names_the_nearest_settings_that_fit_when_nothing_fits() -> None:
    settings = merge(SEVEN, {"simulate": {"model": "llama-3-70b", "gpus": 32}})
    with pytest.raises(UserError, match=r"no plan fits: simulate\.gpus is 32 \(H100\)") as refused:
        make_plan(settings, 1)
    assert "these settings fit: simulate.gpus=40 (" in str(refused.value)
    fitting = "schedule.preset=copris simulate.placement=colocated simulate.offload=true"
    assert f"or {fitting} (" in str(refused.value)
    assert str(refused.value).endswith(" s a step), which a real run on several nodes refuses")
    for assignment in fitting.split():
        settings = merge(settings, parse_override(assignment))
    assert make_plan(settings, 1).candidates


def test_plan_names_settings_that_a_run_accepts_when_it_refuses_every_plan() -> None:
    model = {"model": "llama-3-70b", "gpus": 32, "steps": 6}
    plan = make_plan(merge(SEVEN, {"simulate": model}), 1, ["copris", "async"])
    assert all(candidate.refused for candidate in plan.candidates)
    assert plan.unusable == ["schedule.preset=async needs more GPUs"]
    assert plan.accepted.startswith("simulate.gpus=40 (")
    more = merge(SEVEN, {"simulate": {**model, "gpus": 40}})
    assert not make_plan(more, 1, ["copris"]).candidates[0].refused
    with pytest.raises(UserError, match=r"schedule\.preset async and simulate\.placement disagg"):
        make_plan(merge(SEVEN, {"simulate": model}), 1, ["async"])


def test_plan_names_a_larger_gpu_when_no_number_of_gpus_fits() -> None:
    gpu = {"name": "A6000", "memory_gb": 1.0}
    with pytest.raises(UserError, match=r"choose a larger simulate\.gpu\.name"):
        make_plan(merge(SEVEN, {"simulate": {"gpus": 2, "gpu": gpu}}), 1)


def test_plan_compares_all_schedules_when_the_file_names_none() -> None:
    unnamed = {**SEVEN, "schedule": {"groups_per_batch": 32, "group_size": 8}}
    shown = make_plan(unnamed, 1)
    assert {c.config.schedule.preset for c in shown.candidates} == set(SCHEDULE_PRESETS)
    assert {c.config.simulate.placement for c in shown.candidates} == {"colocated", "disaggregated"}
    asked = make_plan(SEVEN, 1, ["sync", "pipeline"])
    assert {c.config.schedule.preset for c in asked.candidates} == {"sync", "pipeline"}


@pytest.mark.parametrize("preset", ["pipeline", "copris"])
def test_plan_prints_settings_that_a_run_accepts(preset: str) -> None:
    [best, *_] = make_plan(merge(SEVEN, {"simulate": {"gpus": 8}}), 1, [preset]).candidates
    pasted = yaml.safe_load(plan_yaml(best))
    run = {name: section for name, section in SEVEN.items() if name != "simulate"}
    config = build_config(merge(run, pasted))
    assert config.parallel.ranks == best.trainer.layout.ranks
    assert config.engines.placement == best.config.simulate.placement
    assert config.schedule.concurrency == best.engines.concurrency
    assert config.trainer.recompute == best.trainer.recompute


def test_group_source_scales_with_longest_response_when_median_is_unset() -> None:
    drawn = [
        GroupSource(
            LengthConfig.model_validate(settings),
            SimulatedRewardConfig(),
            group_size=8,
            longest=16_384,
            seed=1,
        ).group(0)[0]
        for settings in ({}, {"median": 4096}, {"median": 2500})
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_plan_refuses_an_overlapping_schedule_when_colocated() -> None:
    settings = merge(SEVEN, {"simulate": {"placement": "colocated"}})
    with pytest.raises(UserError, match=r"needs simulate\.placement: disaggregated"):
        make_plan(settings, 1)
    plan = make_plan(settings, 1, ["all"])
    assert {c.config.schedule.preset for c in plan.candidates} == {"sync", "rapid", "copris"}
    assert len(plan.unusable) == 2


def test_plans_that_a_run_refuses_are_ranked_last() -> None:
    shared = make_plan(SEVEN, 6, ["copris"]).candidates
    assert {c.refused for c in shared} == {True, False}
    assert [c.refused for c in shared] == sorted(c.refused for c in shared)


def test_plan_recomputes_as_little_as_fits_unless_recompute_is_set() -> None:
    [chosen] = make_plan(SEVEN, 1).candidates
    assert chosen.config.trainer.recompute != "all"
    [kept] = make_plan(merge(SEVEN, {"trainer": {"recompute": "all"}}), 1).candidates
    assert kept.config.trainer.recompute == kept.trainer.recompute == "all"
    shared = {"simulate": {"placement": "colocated"}, "schedule": {"preset": "copris"}}
    [shared_plan] = make_plan(merge(SEVEN, shared), 1).candidates
    assert shared_plan.trainer.recompute == "all", "the trainer's state stays next to the KV cache"
