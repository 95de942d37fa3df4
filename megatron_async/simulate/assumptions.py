"""Lists everything that a simulation assumes, public figures and assumed constants, as lines of
text.

Invariant: every number that `simulate` or `plan` computes with is a field of `SimulateConfig`, a
figure of a data sheet, or in `CODE_CONSTANTS`. All of them are printed, and docs/simulator.md lists
the assumed ones with their defaults (`tests/simulate/test_assumptions.py` compares them).
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
    """Assumed number or choice.

    Attributes:
        name: Name of the setting or constant.
        value: Its value.
        meaning: Description of what it stands for.
    """

    name: str
    value: object
    meaning: str

    def __str__(self) -> str:
        return f"{self.name}: {self.value}"


_MEANINGS = {
    model_shape: {"BF16": "Bytes of a weight that an engine reads, and of a KV entry."},
    memory: {
        "WEIGHT_BYTES": "Trainer: bytes of a parameter's bf16 weight.",
        "GRADIENT_BYTES": "Trainer: bytes of a parameter's fp32 main gradient.",
        "OPTIMIZER_BYTES": "Trainer: bytes of a parameter's fp32 weight and Adam's two moments, "
        "split over the data-parallel ranks.",
        "STEP_BYTES": "Planner: additional bytes during the step of torch's Adam, for each "
        "parameter of a rank's share of the optimizer.",
        "LOGIT_BYTES": "Planner: bytes of an fp32 logit and its gradient, for "
        "`trainer.logprob_chunk_tokens` tokens at once.",
        "PAUSED_ENGINE_BYTES": "Choice of `trainer.recompute`: bytes of a paused engine on a "
        "shared GPU.",
        "COMMUNICATOR_BYTES": "Engine: bytes of NCCL's buffers for one weight-update group.",
    },
    recomputation: {
        "NORM_BYTES": "Planner: activation bytes of a layer's norms, per token and hidden unit.",
        "GATED_BYTES": "Planner: activation bytes of a gated feed-forward block, per token and "
        "unit of its width.",
        "ROUTED_BYTES": "Planner: activation bytes of the copy of a token that each of its experts "
        "keeps, per hidden unit.",
    },
    lengths: {
        "MEDIAN_SHARE": "Default median response length, as a share of `sampling.max_new_tokens`.",
        "WEIBULL_SHARE": "Default scale of the Weibull distribution, as a share of "
        "`sampling.max_new_tokens`.",
    },
    planner: {
        "ENOUGH_THROUGHPUT": "Planner: share of the largest generation speed at which N' (the "
        "requests in flight) is not raised further.",
        "KV_FILL": "Planner: share of the KV cache that N' requests may fill on average.",
    },
}
CODE_CONSTANTS = tuple(
    Constant(name, getattr(module, name), meaning)
    for module, meanings in _MEANINGS.items()
    for name, meaning in meanings.items()
)
"""Assumed constants that are in the code and not in the settings, such as the bytes of number
formats and thresholds of the planner's rules."""

_NOT_ASSUMED = {"gpu", "gpus", "steps", "warmup_steps"}
"""Fields of `simulate` that are not listed as assumptions: the user chooses them. The figures of
the GPU have a separate line."""


def setting_constants(settings: SimulateConfig) -> list[Constant]:
    """Return the assumed constants among the fields of `simulate`, with the values in `settings`;
    fields that are not set are omitted."""
    return [
        constant
        for constant in _fields(settings, "simulate.")
        if constant.name.split(".")[1] not in _NOT_ASSUMED and constant.value not in (None, "")
    ]


def main_assumptions(config: SimulationConfig) -> list[str]:
    """Return lines about the three assumptions that change the results most, with the settings that
    control them.

    If several configurations are simulated, the command prints only the lines of the first one.
    """
    settings, longest = config.simulate, config.sampling.max_new_tokens
    of_responses, efficiency = settings.lengths, settings.efficiency
    middle = float(length_at_score(of_responses, longest)(np.zeros(1))[0])
    derived = of_responses.median is None and of_responses.distribution == "lognormal"
    source = "a quarter of sampling.max_new_tokens" if derived else "simulate.lengths"
    return [
        f"response lengths: {of_responses.distribution}, median {middle:,.0f} tokens ({source}), "
        f"at most {longest:,}: set simulate.lengths; `megatron-async fit-lengths` computes it from "
        "a run",
        f"training reaches {efficiency.training_flops:.0%} of the GPU's peak: "
        "simulate.efficiency.training_flops",
        f"decoding reaches {efficiency.memory_bandwidth:.0%} of the GPU's memory bandwidth: "
        "simulate.efficiency.memory_bandwidth, or simulate.cost_model from `profile-engine`",
    ]


def assumptions(config: SimulationConfig) -> list[str]:
    """Return all assumptions of a simulation as lines `name: value`: first hardware and model, then
    derived values, then the assumed constants."""
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
        f"{trainer.fixed_seconds:.2f} s in addition to its tokens",
    ]
    if isinstance(costs, MeasuredEngine):
        lines.append(f"measured decode and prefill: {config.simulate.cost_model}")
    return [*lines, *map(str, (*setting_constants(config.simulate), *CODE_CONSTANTS))]


def assumptions_of_all(points: Sequence[tuple[str, SimulationConfig]]) -> list[str]:
    """Return the assumptions that all simulated configurations share, then the other assumptions,
    each with the label of its configuration."""
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
