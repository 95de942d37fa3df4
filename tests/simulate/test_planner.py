"""The planner: what it proposes fits, and its estimate agrees with the simulation."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_async.config.load import merge
from megatron_async.errors import UserError
from megatron_async.simulate.build import simulate
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


def test_a_plan_uses_every_gpu_and_fits() -> None:
    plan = make_plan(SEVEN, 3)
    assert len(plan.candidates) == 3
    for candidate in plan.candidates:
        config = candidate.config
        assert config.parallel.ranks + config.engines.count * config.engines.tensor == 16
        assert candidate.trainer.memory <= 0.8 * 80e9
        assert candidate.summary == simulate(config)
    rates = [c.summary.tokens_per_second for c in plan.candidates if c.summary]
    assert rates == sorted(rates, reverse=True)
    assert f"{plan.candidates[0].trainer.layout.ranks} trainer GPUs" in plan.sentence


def test_the_estimate_is_near_the_simulation() -> None:
    settings = merge(SEVEN, {"simulate": {"steps": 40, "warmup_steps": 20}})
    best = make_plan(settings, 1).candidates[0]
    assert best.summary is not None
    assert best.step_seconds == pytest.approx(best.summary.step_seconds, rel=0.25)


def test_a_model_that_needs_sharding_gets_it() -> None:
    settings = merge(SEVEN, {"simulate": {"model": "llama-3-70b", "gpus": 64, "steps": 5}})
    best = make_plan(settings, 1).candidates[0]
    assert best.trainer.layout.tensor * best.trainer.layout.pipeline >= 8
    assert best.engines.tensor >= 4


def test_shared_gpus_have_runner_ups_too() -> None:
    settings = merge(
        SEVEN,
        {
            "schedule": {"preset": "copris"},
            "simulate": {"placement": "colocated", "offload": True, "steps": 6},
        },
    )
    plan = make_plan(settings, 3)
    assert len(plan.candidates) == 3
    assert {c.trainer.layout.ranks for c in plan.candidates} == {16}


def test_a_lag_bound_limits_the_requests_in_flight() -> None:
    settings = merge(
        SEVEN,
        {
            "schedule": {"preset": "async", "max_async_level": 1, "groups_per_batch": 8},
            "simulate": {"steps": 6},
        },
    )
    for candidate in make_plan(settings, 2).candidates:
        assert candidate.engines.concurrency <= 8 * 8 * 2 + candidate.engines.count


def test_what_cannot_fit_is_refused() -> None:
    settings = merge(SEVEN, {"simulate": {"model": "llama-3-70b", "gpus": 4}})
    with pytest.raises(UserError, match=r"nothing fits: simulate\.gpus 4"):
        make_plan(settings, 1)


def test_overlap_on_shared_gpus_is_refused() -> None:
    settings = merge(SEVEN, {"simulate": {"placement": "colocated"}})
    with pytest.raises(UserError, match="colocated"):
        make_plan(settings, 1)


def test_a_plan_recomputes_as_little_as_fits_unless_it_is_set() -> None:
    [chosen] = make_plan(SEVEN, 1).candidates
    assert chosen.config.trainer.recompute != "all"
    [kept] = make_plan(merge(SEVEN, {"trainer": {"recompute": "all"}}), 1).candidates
    assert kept.config.trainer.recompute == kept.trainer.recompute == "all"
    shared = {"simulate": {"placement": "colocated"}, "schedule": {"preset": "copris"}}
    [beside] = make_plan(merge(SEVEN, shared), 1).candidates
    assert beside.trainer.recompute == "all", "engines keep their memory meanwhile"
