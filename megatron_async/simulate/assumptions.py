"""Everything a simulation rests on, as lines for a person: public figures and assumed constants."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_async.config import RunConfig
from megatron_async.config.base import Settings
from megatron_async.simulate.build import engine_costs, trainer_costs
from megatron_async.simulate.engine_costs import MeasuredEngine
from megatron_async.simulate.hardware import gpu_of
from megatron_async.simulate.model_shape import shape_of


def assumptions(config: RunConfig) -> list[str]:
    """`what: value` lines, in groups: hardware and model, derived, assumed settings."""
    shape, gpu = shape_of(config), gpu_of(config.simulate.gpu)
    costs, trainer = engine_costs(config), trainer_costs(config)
    lines = [
        f"{config.simulate.gpu.name}: {gpu.flops / 1e12:.0f} TFLOP/s bf16, "
        f"{gpu.memory / 1e9:.0f} GB at {gpu.memory_bandwidth / 1e12:.2f} TB/s, NVLink "
        f"{gpu.nvlink / 1e9:.0f} GB/s, network {gpu.network / 1e9:.1f} GB/s, PCIe "
        f"{gpu.pcie / 1e9:.0f} GB/s (data sheet unless set)",
        f"model: {shape.parameters / 1e9:.2f} B parameters, {shape.active_parameters / 1e9:.2f} B "
        f"active, {shape.kv_bytes_per_token} bytes of KV a token",
        f"layout: {config.parallel.ranks} trainer GPUs (TP {config.parallel.tensor}, PP "
        f"{config.parallel.pipeline}, CP {config.parallel.context}), {config.engines.count} "
        f"engines of TP {config.engines.tensor}, {config.simulate.placement}",
        f"KV capacity of an engine: {costs.kv_capacity_tokens} tokens",
        f"weight update: {trainer.publish_seconds:.2f} s; optimizer step: "
        f"{trainer.fixed_seconds:.2f} s beside its tokens",
    ]
    if isinstance(costs, MeasuredEngine):
        lines.append(f"decode and prefill measured: {config.simulate.cost_model}")
    skipped = {"gpu", "gpus", "steps", "warmup_steps", "chunk_tokens", "load_report_seconds"}
    for name, value in _values(config.simulate, ""):
        if name.split(".")[0] not in skipped and value not in (None, ""):
            lines.append(f"simulate.{name}: {value}")
    return lines


def _values(settings: Settings, prefix: str) -> Iterator[tuple[str, object]]:
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from _values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
