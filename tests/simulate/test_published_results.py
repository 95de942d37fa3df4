"""The shape of published results, with nothing fitted: data sheets and the stated assumptions.

Where a published range is given, the tolerance is 10 % on each end. What does not come out is
tested as what it is; docs/simulator.md names the constant that would have to differ.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from benchmarks.papers import rapid_updates as rapid
from megatron_async.config.load import load_simulation
from megatron_async.simulate.build import simulate
from megatron_async.simulate.statistics import Summary

pytestmark = [pytest.mark.slow, pytest.mark.one_core]

CONFIGS = Path(__file__).parents[2] / "configs" / "simulate"
TOLERANCE = 0.10


@cache
def figures(name: str, *overrides: str) -> Summary:
    """One simulated point; equal points are simulated once."""
    return simulate(load_simulation(CONFIGS / f"{name}.yaml", list(overrides)))


def copris(*overrides: str) -> Summary:
    steps = ("simulate.steps=28", "simulate.warmup_steps=12")
    return figures("copris-7b-16gpu", *steps, *overrides)


def copris_over_sync(*overrides: str) -> float:
    sync = copris("schedule.preset=sync", *overrides)
    return copris(*overrides).tokens_per_second / sync.tokens_per_second


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "qwen2.5-7b"])
def test_copris_over_sync_at_16k(model: str) -> None:
    """CoPRIS: 1.58-1.94 times for 1.5B to 7B (8B) models."""
    ratio = copris_over_sync(f"simulate.model={model}")
    assert 1.58 * (1 - TOLERANCE) <= ratio <= 1.94 * (1 + TOLERANCE)


def test_copris_gains_more_with_longer_contexts() -> None:
    """CoPRIS: the gain grows with the context."""
    limits = (7168, 15360, 31744)
    gains = [copris_over_sync(f"sampling.max_new_tokens={limit}") for limit in limits]
    assert gains[0] > 1.1
    assert gains[1] > 1.1 * gains[0]
    assert gains[2] > 1.1 * gains[1]


def test_1024_in_flight_is_better_than_512_and_2048() -> None:
    """CoPRIS, 7B: 512 leaves GPUs under-used, 2048 recomputes and drifts."""
    few, best, many = (copris(f"schedule.concurrency={n}") for n in (512, 1024, 2048))
    assert best.tokens_per_second > 1.03 * few.tokens_per_second
    assert best.tokens_per_second > 1.03 * many.tokens_per_second
    assert few.recomputed < best.recomputed < many.recomputed
    assert few.lag_mean < best.lag_mean < many.lag_mean


def test_copris_gains_nothing_from_uniform_lengths() -> None:
    """The negative control, at equal requests in flight (CoPRIS may still have more of them)."""
    uniform = ("simulate.lengths.distribution=constant", "schedule.concurrency=512")
    assert copris_over_sync(*uniform) == pytest.approx(1.0, abs=0.02)


def conventional(updates: int) -> float:
    """Trained tokens a second with G optimizer steps a generation."""
    groups = f"schedule.groups_per_batch={128 * updates}"
    updates_ = f"schedule.updates_per_batch={updates}"
    steps = ("simulate.steps=3", "simulate.warmup_steps=1")
    return figures("conventional-7b-128gpu", groups, updates_, *steps).tokens_per_second


def test_pipeline_is_about_twice_as_fast_as_the_conventional_loop_at_128_gpus() -> None:
    """PipelineRL: about 2 times, there against G = 32. Here that much comes out at G = 8."""
    pipeline = figures("pipeline-7b-128gpu").tokens_per_second
    assert pipeline / conventional(8) == pytest.approx(2.0, rel=0.15)
    assert 1.0 < pipeline / conventional(32) < 1.5  # not the published size


def test_pipeline_is_faster_at_equal_largest_lag() -> None:
    """PipelineRL: up to 1.57 times, by its authors' analysis. G updates have a lag of G - 1."""
    pipeline = figures("pipeline-7b-128gpu")
    ratio = pipeline.tokens_per_second / conventional(pipeline.lag_max + 1)
    assert 1.2 < ratio <= 1.57 * (1 + TOLERANCE)


def test_the_published_case_study_at_equal_lag() -> None:
    """PipelineRL, appendix A.4: 16.9 against 10.7 tokens a flash, 1.57 times, at a lag of 133.

    With the source's own hardware model. It takes the smaller of both stages' throughputs; here a
    batch of 128 fluctuates, so that either stage waits for the other at times.
    """
    engine = f"simulate.cost_model={CONFIGS / 'engines' / 'matmul-h100-7b.yaml'}"
    flash = 2 * 7.07e9 / 989e12
    loop = figures("conventional-case-study-128gpu", engine).tokens_per_second
    pipeline = figures("pipeline-case-study-128gpu", engine).tokens_per_second
    assert loop * flash == pytest.approx(10.7, rel=0.05)
    assert pipeline * flash == pytest.approx(16.9, rel=0.15)
    assert pipeline / loop == pytest.approx(1.57, rel=0.15)


def rapid_saving(updates: int, *overrides: str, baseline_passes: int = 1) -> float:
    """Share of the time per optimizer step on MATH that H = `updates` saves against H = 1."""

    def seconds(h: int, passes: int) -> float:
        return rapid.simulated(rapid.MATH.groups, h, passes, *overrides).step_seconds / h

    return 1 - seconds(updates, 1) / seconds(1, baseline_passes)


TASKS = (rapid.MATH, rapid.MINIF2F, rapid.MBPP)


@pytest.mark.parametrize("updates", [4, 8])
def test_rapid_saves_most_on_mbpp_and_least_on_math(updates: int) -> None:
    """RAPID: 11 % (MATH), 32 % (MiniF2F), 34 % (MBPP+) of a run, against its fastest baseline."""
    savings = [rapid.run_saving(task, updates, 0) for task in TASKS]
    assert savings == sorted(savings)


def test_rapid_saves_more_than_published_at_the_published_h() -> None:
    """By 6 (MATH, H = 4), 6 (MiniF2F, H = 8) and 14 points (MBPP+, H = 8): known to be off.

    The training costs more than is modeled, and the source's responses are longer with H = 8.
    """
    above = [rapid.run_saving(task, task.published[0], 0) - task.published[1] for task in TASKS]
    assert above == pytest.approx([0.06, 0.06, 0.14], abs=0.01)


@pytest.mark.parametrize("baseline_passes", [0, 1], ids=["policy gradient", "GRPO"])
def test_rapid_saves_more_with_larger_h_and_less_and_less_so(baseline_passes: int) -> None:
    """RAPID: H of 4 to 16. On MATH all of that is in the range that is published for all three."""
    savings = [rapid_saving(h, baseline_passes=baseline_passes) for h in (4, 8, 16)]
    for saving in savings:
        assert 0.11 * (1 - TOLERANCE) <= saving <= 0.34 * (1 + TOLERANCE)
    assert savings[0] < savings[1] < savings[2]
    assert savings[1] - savings[0] > savings[2] - savings[1]


def test_padding_is_what_limits_rapid() -> None:
    """A trainer that packs saves more: a larger batch has a longer longest response."""
    assert rapid_saving(8, "simulate.padding=packed") > 1.5 * rapid_saving(8)
