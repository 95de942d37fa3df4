"""Everything a simulation rests on, as lines for a person: public figures and assumed constants.

Invariant: a number that `simulate` or `plan` computes with is a field of `SimulateConfig`, a figure
of a data sheet, or in `CODE_CONSTANTS`; all of them are printed, and docs/simulator.md lists the
assumed ones with their defaults (`tests/simulate/test_assumptions.py` compares).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_async.config.base import Settings
from megatron_async.config.simulate import SimulateConfig, SimulationConfig
from megatron_async.models import shape as model_shape
from megatron_async.models.shape import shape_of
from megatron_async.simulate import lengths, memory, planner, recomputation
from megatron_async.simulate.build import engine_costs, trainer_costs
from megatron_async.simulate.engine_costs import MeasuredEngine
from megatron_async.simulate.hardware import gpu_of
from megatron_async.simulate.lengths import length_at_score


@dataclass(frozen=True)
class Constant:
    """An assumed number or choice."""

    name: str
    value: object
    meaning: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


_MEANINGS = {
    model_shape: {"BF16": "Bytes of a weight that an engine reads and of a KV entry."},
    memory: {
        "WEIGHT_BYTES": "Of a parameter in the trainer: bf16 weight.",
        "GRADIENT_BYTES": "Of a parameter: fp32 main gradient.",
        "OPTIMIZER_BYTES": "Of a parameter, spread over the data-parallel ranks: fp32 weight and "
        "Adam's two moments.",
        "STEP_BYTES": "Planner: of each parameter of the optimizer's part, in the step of torch's "
        "Adam.",
        "LOGIT_BYTES": "Planner: fp32 logit and its gradient, for `trainer.logprob_chunk_tokens` "
        "at once.",
        "PAUSED_ENGINE_BYTES": "`trainer.recompute`: memory of a paused engine on a shared GPU.",
        "COMMUNICATOR_BYTES": "Engine: NCCL's buffers of a weight-update group.",
    },
    recomputation: {
        "NORM_BYTES": "Planner: activations of a layer's norms, per token and hidden unit.",
        "GATED_BYTES": "Planner: of a feed-forward part, per token and unit of its width.",
        "ROUTED_BYTES": "Planner: of a token's copy for each of its experts, per hidden unit.",
    },
    lengths: {
        "MEDIAN_SHARE": "Median of the responses over `sampling.max_new_tokens`, unless it is set.",
        "WEIBULL_SHARE": "Scale of Weibull's distribution over `sampling.max_new_tokens`, unless "
        "it is set.",
    },
    planner: {
        "ENOUGH_THROUGHPUT": "Planner: share of the largest generation speed at which N' is not "
        "raised further.",
        "KV_FILL": "Planner: share of the KV cache that N' may fill on average.",
    },
}
CODE_CONSTANTS = tuple(
    Constant(name, getattr(module, name), meaning)
    for module, meanings in _MEANINGS.items()
    for name, meaning in meanings.items()
)
"""Assumptions in the code instead of the settings: formats of numbers, and rules."""

_NOT_ASSUMED = {"gpu", "gpus", "steps", "warmup_steps"}
"""Given by whoever asks; the GPU's figures have a line of their own."""


def setting_constants(settings: SimulateConfig) -> list[Constant]:
    """The fields of `simulate` that are set, with the values that are used."""
    return [
        constant
        for constant in _fields(settings, "simulate.")
        if constant.name.split(".")[1] not in _NOT_ASSUMED and constant.value not in (None, "")
    ]


def main_assumptions(config: SimulationConfig) -> list[str]:
    """Return the three assumptions that change the results most, with the settings that hold them.

    For a sweep they are those of its first point.
    """
    settings, longest = config.simulate, config.sampling.max_new_tokens
    of_responses, efficiency = settings.lengths, settings.efficiency
    middle = float(length_at_score(of_responses, longest)(np.zeros(1))[0])
    derived = of_responses.median is None and of_responses.distribution == "lognormal"
    source = "a quarter of sampling.max_new_tokens" if derived else "simulate.lengths"
    return [
        f"response lengths: {of_responses.distribution}, median {middle:,.0f} tokens ({source}), "
        f"at most {longest:,}: set simulate.lengths; `megatron-async fit-lengths` takes them from "
        "a run",
        f"training reaches {efficiency.training_flops:.0%} of the GPU's peak: "
        "simulate.efficiency.training_flops",
        f"decoding reaches {efficiency.memory_bandwidth:.0%} of the GPU's memory bandwidth: "
        "simulate.efficiency.memory_bandwidth, or simulate.cost_model from `profile-engine`",
    ]


def assumptions(config: SimulationConfig) -> list[str]:
    """`what: value` lines, in groups: hardware and model, derived, assumed."""
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
        f"trainer.recompute: {trainer.recompute}",
        f"KV capacity of an engine: {costs.kv_capacity_tokens} tokens",
        f"weight update: {trainer.publish_seconds:.2f} s; optimizer step: "
        f"{trainer.fixed_seconds:.2f} s beside its tokens",
    ]
    if isinstance(costs, MeasuredEngine):
        lines.append(f"decode and prefill measured: {config.simulate.cost_model}")
    return [*lines, *map(str, (*setting_constants(config.simulate), *CODE_CONSTANTS))]


def assumptions_of_all(points: Sequence[tuple[str, SimulationConfig]]) -> list[str]:
    """Return the assumptions of all (label, configuration) points, then those of some."""
    lines = [(label, assumptions(config)) for label, config in points]
    shared = [line for line in lines[0][1] if all(line in others for _, others in lines)]
    own = [f"{label}: {line}" for label, its in lines for line in its if line not in shared]
    return shared + own


def _fields(settings: Settings, prefix: str) -> Iterator[Constant]:
    for name, field in type(settings).model_fields.items():
        value = getattr(settings, name)
        if isinstance(value, Settings):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield Constant(f"{prefix}{name}", value, " ".join((field.description or "").split()))
