"""Tests of the cost models of engines and trainers: limits of the roofline, measured tables, memory
and padding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_async.config.load import build_simulation, load_simulation, merge
from megatron_async.config.model import ParallelConfig, Recompute
from megatron_async.config.simulate import EfficiencyConfig, GpuConfig
from megatron_async.errors import UserError
from megatron_async.launcher.derived import Machine, derive
from megatron_async.models.shape import SHAPES
from megatron_async.simulate.assumptions import assumptions
from megatron_async.simulate.build import (
    engine_costs,
    fitting_recompute,
    group_source,
    memory_of_trainer,
    trainer_costs,
)
from megatron_async.simulate.engine_costs import (
    FORMAT,
    FORMAT_VERSION,
    RooflineEngine,
    fit_engine_costs,
    read_engine_costs,
)
from megatron_async.simulate.hardware import DATA_SHEETS, gpu_of
from megatron_async.simulate.memory import (
    TrainerMemory,
    kv_capacity_tokens,
    offloaded_bytes,
    trainer_memory,
    trainer_state_bytes,
)
from megatron_async.simulate.recomputation import (
    by_work,
    kept_bytes,
    recomputed_passes,
)
from megatron_async.simulate.trainer_costs import TrainerCosts
from megatron_async.weight_sync.stage_order import SENDERS_AT_ONCE

PEAK = EfficiencyConfig(
    memory_bandwidth=1,
    decode_flops=1,
    prefill_flops=1,
    links=1,
    collective_latency_seconds=0,
    decode_overhead_seconds=0,
)
SEVEN = SHAPES["qwen2.5-7b"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen2.5-0.5b", 0.494), ("qwen2.5-1.5b", 1.54), ("qwen2.5-7b", 7.62), ("llama-3-70b", 70.6)],
)
def test_model_shape_has_the_published_parameter_count(name: str, billions: float) -> None:
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.005)


def test_weight_bytes_read_count_only_experts_in_use() -> None:
    moe = SHAPES["qwen3-30b-a3b"]
    assert moe.parameters / 1e9 == pytest.approx(30.5, rel=0.01)
    assert moe.active_parameters / 1e9 == pytest.approx(3.3, rel=0.1)
    one, many = moe.weight_bytes_read(1), moe.weight_bytes_read(4096)
    assert one == pytest.approx(2 * moe.active_parameters, rel=0.01)
    assert many == pytest.approx(2 * (moe.parameters - moe.head_parameters), rel=0.01)


def test_roofline_is_memory_bound_for_small_and_compute_bound_for_large_batches() -> None:
    gpu = DATA_SHEETS["H100"]
    engine = RooflineEngine(SEVEN, gpu, PEAK, 1, 10**6)
    read = 2 * SEVEN.active_parameters / gpu.memory_bandwidth
    assert engine.decode(1)[0] == pytest.approx(read)
    assert engine.decode(64)[0] == pytest.approx(read)
    large = 4096
    assert engine.decode(large)[0] == pytest.approx(2 * SEVEN.active_parameters * large / gpu.flops)
    assert engine.decode(1)[1] == pytest.approx(SEVEN.kv_bytes_per_token / gpu.memory_bandwidth)


def test_prefill_pass_is_memory_bound_for_few_and_compute_bound_for_many_tokens() -> None:
    gpu = DATA_SHEETS["H100"]
    engine = RooflineEngine(SEVEN, gpu, PEAK, 1, 10**6)
    read = 2 * SEVEN.active_parameters / gpu.memory_bandwidth
    assert engine.prefill(1, 0.0) == engine.prefill(100, 0.0) == pytest.approx(read)
    computed = 2 * SEVEN.active_parameters * 8192 / gpu.flops
    assert engine.prefill(8192, 0.0) == pytest.approx(computed)
    slower = replace(engine, efficiency=PEAK.model_copy(update={"decode_overhead_seconds": 0.1}))
    assert slower.prefill(1, 0.0) == pytest.approx(read + 0.1)


def test_kv_capacity_is_the_memory_remaining_after_weights() -> None:
    free = 80e9 * 0.9 - 2 * SEVEN.parameters
    assert kv_capacity_tokens(SEVEN, 80e9, 0.9, 1, 0.0) == int(free // 57344)
    assert kv_capacity_tokens(SEVEN, 80e9, 0.9, 1, 60e9) < 0
    # 8 ranks share 4 KV heads, so each head is stored twice.
    doubled = kv_capacity_tokens(SEVEN, 80e9, 0.9, 8, 0.0)
    assert doubled == int((8 * 72e9 - 2 * SEVEN.parameters) // (2 * 57344))


def test_trainer_state_bytes_match_megatron_sharding() -> None:
    parameters = SEVEN.parameters
    one, many = ParallelConfig(), ParallelConfig(ranks=16, tensor=2, pipeline=2)
    assert trainer_state_bytes(SEVEN, one, sharded=True) == 18 * parameters
    assert trainer_state_bytes(SEVEN, many, sharded=True) == parameters / 4 * (6 + 3)
    assert trainer_state_bytes(SEVEN, many, sharded=False) == parameters / 4 * 18


def test_offloaded_bytes_exclude_gradients() -> None:
    parameters = SEVEN.parameters
    many = ParallelConfig(ranks=16, tensor=2, pipeline=2)
    assert offloaded_bytes(SEVEN, ParallelConfig(), sharded=True) == 14 * parameters
    assert offloaded_bytes(SEVEN, many, sharded=True) == parameters / 4 * (2 + 3)


def test_trainer_memory_peak_adds_only_the_larger_phase_to_the_state() -> None:
    """Activations are freed before the optimizer's step; which of the two is larger depends on
    DP."""

    def memory(data: int) -> TrainerMemory:
        layout = ParallelConfig(ranks=2 * data, tensor=2)
        sizes = {"microbatch_tokens": 16384, "logit_tokens": 0}
        return trainer_memory(SEVEN, layout, sharded=True, recompute="all", **sizes)

    alone, many = memory(1), memory(16)
    assert alone.optimizer_step == 4 * SEVEN.parameters / 2 == 16 * many.optimizer_step
    assert alone.peak == alone.state + alone.optimizer_step > alone.state + alone.activations
    assert many.peak == many.state + many.activations > many.state + many.optimizer_step


@pytest.mark.parametrize(
    ("recompute", "kept", "transient", "passes"),
    [
        ("none", 28 * 46, 0, 0.0),
        ("feed_forward", 28 * 15, 31, 0.75),
        (14, 14 * 2 + 14 * 46, 0, 0.5),
        (27, 27 * 2 + 46, 0, 27 / 28),
        ("all", 28 * 2, 46, 1.0),
        (28, 28 * 2, 46, 1.0),
    ],
)
def test_kept_bytes_fall_and_recomputed_passes_rise_with_recomputation(
    recompute: Recompute, kept: float, transient: float, passes: float
) -> None:
    assert kept_bytes(SEVEN, 28, recompute) == pytest.approx((kept, transient), rel=0.03)
    assert recomputed_passes(SEVEN, 28, recompute) == pytest.approx(passes, abs=0.06)


def test_fitting_recompute_returns_the_least_work_that_fits() -> None:
    config = build_simulation(
        {
            "parallel": {"ranks": 32, "tensor": 2},
            "simulate": {"model": "qwen2.5-7b", "trainer_memory_share": 1.0},
        }
    )
    peaks = [memory_of_trainer(config, SEVEN, choice).peak for choice in by_work(SEVEN, 28)]
    assert fitting_recompute(config, SEVEN, 1e12) == "none"
    assert fitting_recompute(config, SEVEN, min(peaks) - 1) is None
    memory = (peaks[0] + peaks[-1]) / 2
    found = fitting_recompute(config, SEVEN, memory)
    assert isinstance(found, int) and 0 < found < 28
    assert memory_of_trainer(config, SEVEN, found).peak <= memory
    assert memory_of_trainer(config, SEVEN, found - 1).peak > memory
    explicit = config.with_section("trainer", recompute="none")
    assert fitting_recompute(explicit, SEVEN, memory) is None


def test_gpu_of_uses_configured_figures_before_the_data_sheet() -> None:
    gpu = gpu_of(GpuConfig(name="A100", memory_gb=40))
    assert (gpu.memory, gpu.flops) == (40e9, 312e12)


def table(**changes: object) -> dict[str, object]:
    decode = [
        {"batch": b, "kv_tokens": kv, "seconds": 0.001 * b + 1e-6 * kv}
        for b in (1, 16, 64)
        for kv in (100 * b, 400 * b)
    ]
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kv_capacity_tokens": 65536,
        "decode": decode,
        "prefill": [{"tokens": n, "seconds": 0.002 + 1e-5 * n} for n in (16, 128, 512)],
    }
    return {**data, **changes}


def test_measured_engine_interpolates_and_extrapolates_batches() -> None:
    costs = fit_engine_costs(table())
    for batch in (1, 8, 16, 40, 64, 128):
        assert costs.decode(batch) == pytest.approx((0.001 * batch, 1e-6), rel=1e-6)
    assert costs.request_seconds == pytest.approx(0.002)
    assert costs.prefill(300, 0.0) == pytest.approx(0.003)


def test_fit_engine_costs_accepts_one_context_per_batch() -> None:
    decode = [{"batch": 4, "kv_tokens": 100, "seconds": 0.01}]
    assert fit_engine_costs(table(decode=decode)).decode(4) == pytest.approx((0.01, 0.0))


def test_engine_costs_use_cost_model_file_with_its_capacity(tmp_path: Path) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(table()))
    config = build_simulation({"simulate": {"cost_model": str(path), "model": "qwen2.5-0.5b"}})
    costs = engine_costs(config)
    assert costs.kv_capacity_tokens == 65536
    assert costs.decode(16)[0] == pytest.approx(0.016)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "other"}, "is not a cost model"),
        ({"format_version": 9}, "format_version 9"),
        ({"decode": []}, "has missing or invalid values"),
        ({"decode": [{"batch": 1}]}, "kv_tokens"),
    ],
)
def test_read_engine_costs_names_the_defect_when_file_is_damaged(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    path = tmp_path / "engine.yaml"
    path.write_text(yaml.safe_dump(table(**changes)))
    with pytest.raises(UserError, match=words):
        read_engine_costs(path)


def test_read_engine_costs_fails_when_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_engine_costs(tmp_path / "nothing.yaml")


H100 = Machine("cuda", "H100", 80e9)


def costs(**simulate: object) -> TrainerCosts:
    settings = {"model": "qwen2.5-0.5b", "gpu": {"name": "A100"}, **simulate}
    return trainer_costs(build_simulation({"parallel": {"ranks": 1}, "simulate": settings}))


def test_batch_padding_extends_to_longest_sequence_of_whole_batch() -> None:
    padded = costs(padding="batch").batch_seconds([300, 100, 100, 200], 2)
    assert padded == pytest.approx(costs().batch_seconds([300] * 4, 2))


def test_longest_sequence_limits_the_gain_from_more_data_parallel_ranks() -> None:
    """One sequence of 8,000 tokens and 100 of 400, which fill 4 more ranks with 10,000 tokens."""

    def seconds(ranks: int, lengths: list[int]) -> float:
        settings = {"model": "qwen2.5-0.5b", "trainer_seconds_per_update": 0.0}
        settings["efficiency"] = {"batch_overhead_seconds": 0.0}
        layout = {"parallel": {"ranks": ranks}, "simulate": settings}
        return trainer_costs(build_simulation(layout)).batch_seconds(lengths, 1)

    mixed = [8000, *[400] * 100]
    alone = seconds(1, [8000])
    assert seconds(2, mixed) == pytest.approx(seconds(1, mixed) / 2)
    assert seconds(8, mixed) == seconds(64, mixed) == pytest.approx(alone)
    tokens = seconds(1, [400] * 20)
    assert alone > 1.05 * tokens, "attention costs more in one sequence than in 20 short ones"


def test_reduction_overlap_removes_this_share_of_the_reduction() -> None:
    def fixed(overlap: float) -> float:
        efficiency = {"reduction_overlap": overlap, "update_overhead_seconds": 0.0}
        simulated = {"model": "qwen2.5-7b", "efficiency": efficiency}
        config = build_simulation({"parallel": {"ranks": 16}, "simulate": simulated})
        return trainer_costs(config).fixed_seconds

    assert fixed(0.0) > 0.5
    assert fixed(0.75) == pytest.approx(fixed(0.0) / 4)
    assert fixed(1.0) == 0


VERL = {32: 269.80, 64: 133.41, 128: 113.81}
"""Published seconds of verl's `update_actor` by number of GPUs (docs/simulator.md)."""


def verl_seconds(ranks: int, *changes: str) -> float:
    """Return the mean seconds of training on one of two batches."""
    file = Path(__file__).parents[2] / "configs" / "simulate" / "verl-7b-h20.yaml"
    config = load_simulation(file, [f"parallel.ranks={ranks}", *changes])
    source, prompt = group_source(config), config.simulate.lengths.prompt_tokens
    lengths = [prompt + length for group in range(2 * 512) for length in source.group(group)[0]]
    trainer = trainer_costs(config)
    batches = (lengths[: len(lengths) // 2], lengths[len(lengths) // 2 :])
    return sum(trainer.batch_seconds(batch, 16) for batch in batches) / 2


def test_training_time_matches_published_times_at_a_fixed_batch() -> None:
    """Three values (the lengths' median and sigma, and the share of the peak) are fitted to the
    three times. The control shows that the long responses cause the small gain from 64 to 128."""
    found = {ranks: verl_seconds(ranks) for ranks in VERL}
    assert found == pytest.approx(VERL, rel=0.06)
    assert found[64] / found[128] == pytest.approx(VERL[64] / VERL[128], rel=0.05)
    equal = ("simulate.lengths.distribution=constant", "simulate.lengths.median=1000")
    assert verl_seconds(64, *equal) / verl_seconds(128, *equal) > 1.85


def test_background_publication_splits_an_update_into_copy_transfer_and_load() -> None:
    """A leader of each of 2 stages copies its half, and each of 4 GPUs of an engine loads a
    quarter."""
    layout = {"parallel": {"ranks": 8, "pipeline": 2}, "engines": {"count": 1, "tensor": 4}}

    def update(**simulate: object) -> TrainerCosts:
        settings = {"model": "llama-3-70b", "gpu": {"name": "H100"}, **simulate}
        return trainer_costs(build_simulation({**layout, "simulate": settings}))

    foreground, background = update(), update(background_publication=True)
    whole = 2 * SHAPES["llama-3-70b"].parameters / (64e9 * 0.7)
    overhead = foreground.settings.efficiency.weight_update_overhead_seconds
    assert background.copy_seconds == pytest.approx(whole / 2)
    assert background.publish_seconds == pytest.approx(whole / 4 + overhead)
    assert background.background_seconds == pytest.approx(foreground.publish_seconds - overhead)
    measured = update(background_publication=True, weight_update_seconds=7.0)
    assert measured.background_seconds == 7.0
    assert measured.publish_seconds == background.publish_seconds


def test_batch_seconds_count_extra_passes_once_when_epochs_repeat() -> None:
    simulated = {"trainer_seconds_per_update": 3.0, "extra_forward_passes": 2.0}
    once = costs(**simulated)
    thrice = replace(once, epochs=3)
    without = costs(trainer_seconds_per_update=3.0)
    passes = once.batch_seconds([100] * 4, 2) - without.batch_seconds([100] * 4, 2)
    overhead = once.settings.efficiency.batch_overhead_seconds
    trained = without.batch_seconds([100] * 4, 2) - overhead
    expected = overhead + 3 * trained + passes
    assert passes > 0 and thrice.batch_seconds([100] * 4, 2) == pytest.approx(expected)
    config = build_simulation({"simulate": {"model": "qwen2.5-0.5b"}, "algorithm": {"epochs": 3}})
    assert trainer_costs(config).epochs == 3


def test_weight_update_uses_one_link_with_every_layout() -> None:
    """Pipeline stages send in turn (tests/weight_sync/test_stages.py), each from one leader."""
    simulated = {"model": "llama-3-70b", "gpu": {"name": "H100"}}

    def update(**layout: object) -> TrainerCosts:
        engines = {"count": 4, "tensor": 8}
        return trainer_costs(
            build_simulation({"parallel": layout, "engines": engines, "simulate": simulated})
        )

    alone = update(ranks=1)
    for layout in ({"ranks": 16, "tensor": 8, "pipeline": 2}, {"ranks": 32, "pipeline": 4}):
        assert update(**layout).publish_seconds == alone.publish_seconds
    share = alone.settings.efficiency
    sent = alone.publish_seconds - share.weight_update_overhead_seconds
    assert sent == pytest.approx(2 * 70.55e9 / (alone.gpu.network * share.weight_update), rel=0.01)
    assert SENDERS_AT_ONCE == 1, "with more senders, count the links of all of them"


def test_simulation_uses_the_recomputation_that_a_start_would_choose() -> None:
    model = {"simulate": {"model": "qwen2.5-7b"}, "parallel": {"ranks": 8, "tensor": 2}}
    sizes = {"trainer": {"microbatch_tokens": 20480}}
    config = build_simulation(merge(model, sizes))
    assert trainer_costs(config).recompute == derive(config, H100).config.trainer.recompute
    assert isinstance(trainer_costs(config).recompute, int)
    assert f"trainer.recompute: {trainer_costs(config).recompute}" in assumptions(config)
    explicit = build_simulation(merge(model, {"trainer": {"recompute": "none"}}))
    assert trainer_costs(explicit).recompute == "none"
