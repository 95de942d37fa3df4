"""Tests that simulations reproduce the shape of published results, from data sheets and the stated
assumptions without any fit.

Where a published range exists, the tolerance is 10 % on each end. Results that differ from the
published ones are tested as they are; docs/simulator.md names the constant that would have to
differ.
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
    """Return the summary of one simulated configuration; equal configurations are simulated
    once."""
    return simulate(load_simulation(CONFIGS / f"{name}.yaml", list(overrides)))


def copris(*overrides: str) -> Summary:
    steps = ("simulate.steps=28", "simulate.warmup_steps=12")
    return figures("copris-7b-16gpu", *steps, *overrides)


def copris_over_sync(*overrides: str) -> float:
    sync = copris("schedule.preset=sync", *overrides)
    return copris(*overrides).tokens_per_second / sync.tokens_per_second


@pytest.mark.parametrize("model", ["qwen2.5-1.5b", "qwen2.5-7b"])
def test_copris_speedup_over_sync_at_16k_is_in_published_range(model: str) -> None:
    """CoPRIS reports 1.58-1.94 times for 1.5B to 7B (8B) models."""
    ratio = copris_over_sync(f"simulate.model={model}")
    assert 1.58 * (1 - TOLERANCE) <= ratio <= 1.94 * (1 + TOLERANCE)


def test_copris_speedup_grows_with_context_length() -> None:
    """CoPRIS reports that the gain grows with the context."""
    limits = (7168, 15360, 31744)
    gains = [copris_over_sync(f"sampling.max_new_tokens={limit}") for limit in limits]
    assert gains[0] > 1.1
    assert gains[1] > 1.1 * gains[0]
    assert gains[2] > 1.1 * gains[1]


def test_copris_concurrency_1024_beats_512_and_2048() -> None:
    """CoPRIS reports for 7B that 512 leaves GPUs under-used, and that 2048 recomputes and
    drifts."""
    few, best, many = (copris(f"schedule.concurrency={n}") for n in (512, 1024, 2048))
    assert best.tokens_per_second > 1.03 * few.tokens_per_second
    assert best.tokens_per_second > 1.03 * many.tokens_per_second
    assert few.recomputed < best.recomputed < many.recomputed
    assert few.lag_mean < best.lag_mean < many.lag_mean


def test_copris_has_no_speedup_when_lengths_are_uniform() -> None:
    """This is the negative control, with equal numbers of requests in flight (otherwise CoPRIS may
    have more of them)."""
    uniform = ("simulate.lengths.distribution=constant", "schedule.concurrency=512")
    assert copris_over_sync(*uniform) == pytest.approx(1.0, abs=0.02)


def conventional(updates: int) -> float:
    """Return the trained tokens a second of the conventional loop with `updates` optimizer steps
    per generation."""
    groups = f"schedule.groups_per_batch={128 * updates}"
    updates_ = f"schedule.updates_per_batch={updates}"
    steps = ("simulate.steps=3", "simulate.warmup_steps=1")
    return figures("conventional-7b-128gpu", groups, updates_, *steps).tokens_per_second


def test_pipeline_doubles_conventional_loop_speed_at_128_gpus() -> None:
    """PipelineRL reports about 2 times, against G = 32. Here this ratio occurs at G = 8."""
    pipeline = figures("pipeline-7b-128gpu").tokens_per_second
    assert pipeline / conventional(8) == pytest.approx(2.0, rel=0.15)
    assert 1.0 < pipeline / conventional(32) < 1.5  # The ratio is smaller than the published ratio.


def test_pipeline_is_faster_than_conventional_loop_at_equal_largest_lag() -> None:
    """PipelineRL reports up to 1.57 times, by its authors' analysis. G updates have a lag of G -
    1."""
    pipeline = figures("pipeline-7b-128gpu")
    ratio = pipeline.tokens_per_second / conventional(pipeline.lag_max + 1)
    assert 1.2 < ratio <= 1.57 * (1 + TOLERANCE)


def test_pipeline_case_study_matches_published_speeds_at_equal_lag() -> None:
    """PipelineRL, appendix A.4, reports 16.9 against 10.7 tokens a flash, 1.57 times, at a lag of
    133.

    The test uses the source's own hardware model. The source takes the smaller of both stages'
    throughputs; here a batch of 128 fluctuates, so that each stage sometimes waits for the other.
    """
    engine = f"simulate.cost_model={CONFIGS / 'engines' / 'matmul-h100-7b.yaml'}"
    flash = 2 * 7.07e9 / 989e12
    loop = figures("conventional-case-study-128gpu", engine).tokens_per_second
    pipeline = figures("pipeline-case-study-128gpu", engine).tokens_per_second
    assert loop * flash == pytest.approx(10.7, rel=0.05)
    assert pipeline * flash == pytest.approx(16.9, rel=0.15)
    assert pipeline / loop == pytest.approx(1.57, rel=0.15)


def rapid_saving(updates: int, *overrides: str, baseline_passes: int = 1) -> float:
    """Return the share of the time per optimizer step on MATH that H = `updates` saves against H =
    1."""

    def seconds(h: int, passes: int) -> float:
        return rapid.simulated(rapid.MATH.groups, h, passes, *overrides).step_seconds / h

    return 1 - seconds(updates, 1) / seconds(1, baseline_passes)


TASKS = (rapid.MATH, rapid.MINIF2F, rapid.MBPP)


@pytest.mark.parametrize("updates", [4, 8])
def test_rapid_saving_is_largest_on_mbpp_and_smallest_on_math(updates: int) -> None:
    """RAPID reports 11 % (MATH), 32 % (MiniF2F) and 34 % (MBPP+) of a run, against its fastest
    baseline."""
    savings = [rapid.run_saving(task, updates, 0) for task in TASKS]
    assert savings == sorted(savings)


def test_rapid_saving_exceeds_published_saving_at_published_h() -> None:
    """The simulated saving is too large by 6 (MATH, H = 4), 6 (MiniF2F, H = 8) and 14 points
    (MBPP+, H = 8).

    The causes are known: real training costs more than is modeled, and the source's responses are
    longer with H = 8.
    """
    above = [rapid.run_saving(task, task.published[0], 0) - task.published[1] for task in TASKS]
    assert above == pytest.approx([0.06, 0.06, 0.14], abs=0.01)


@pytest.mark.parametrize("baseline_passes", [0, 1], ids=["policy gradient", "GRPO"])
def test_rapid_saving_grows_with_h_at_a_decreasing_rate(baseline_passes: int) -> None:
    """RAPID tests H of 4 to 16. On MATH, all these savings are within the range that is published
    for the three tasks."""
    savings = [rapid_saving(h, baseline_passes=baseline_passes) for h in (4, 8, 16)]
    for saving in savings:
        assert 0.11 * (1 - TOLERANCE) <= saving <= 0.34 * (1 + TOLERANCE)
    assert savings[0] < savings[1] < savings[2]
    assert savings[1] - savings[0] > savings[2] - savings[1]


def test_rapid_saving_is_larger_when_sequences_are_packed() -> None:
    """Padding limits the saving: a larger batch has a longer longest response."""
    assert rapid_saving(8, "simulate.padding=packed") > 1.5 * rapid_saving(8)
