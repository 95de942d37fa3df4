"""Settings that are derived from the machine and the model unless the user sets them.

The defaults in `config/` suit a laptop. `derive` replaces defaults that nobody has set (by file,
recipe, preset or command line) with values for the machine that the run will use. `train`,
`launch`, `doctor --config` and `settings` all use and show this result.

Invariants
- A setting that the user has set is never changed.
- If engines run on the CPU, only `task.scorer_workers` can change, because the other defaults suit
  a CPU.
- `derive` is pure: the same configuration and machine give the same result. A run stores the
  derived settings in its config.yaml, and a resume uses the stored ones, also on another machine.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from megatron_async.config import RunConfig
from megatron_async.config.model import Recompute
from megatron_async.config.simulate import GpuConfig, GpuName, SimulationConfig, simulation_of
from megatron_async.errors import UserError
from megatron_async.models.shape import ModelShape, shape_of
from megatron_async.runtime.gpus import sees_gpu
from megatron_async.simulate.build import fitting_recompute, memory_of_trainer
from megatron_async.simulate.hardware import DATA_SHEETS, gpu_of
from megatron_async.simulate.memory import kv_capacity_tokens, update_bytes
from megatron_async.simulate.planner import sufficient_concurrency
from megatron_async.weight_sync.gpu_sharing import trainer_ranks_of

_GRAPH_STEP: Final = 8
_GPU_START_SECONDS: Final = 1200.0
_GB: Final = 1e9
_ANY_GPU: Final = GpuConfig()
_SHARE: Final = "--mem-fraction-static"
_SET: Final = "set by a file, the command line, the recipe or the preset"


@dataclass(frozen=True)
class Machine:
    """Hardware on which a run will run. All of its nodes are assumed to have the same hardware.

    Attributes:
        device: Kind of device on which the engines run.
        gpu: Name of the GPU in the simulator's table of data sheets (`DATA_SHEETS`); None for a CPU
            or a GPU that is not in the table.
        memory_bytes: Memory of one GPU.
        cores: CPU cores; None if unknown.
        engine_nodes: Number of nodes that run engines.
    """

    device: Literal["cpu", "cuda"]
    gpu: GpuName | None = None
    memory_bytes: float = 0.0
    cores: int | None = None
    engine_nodes: int = 1

    @classmethod
    def here(cls, config: RunConfig) -> "Machine":
        """Return the hardware of this machine. `device` is the kind that `engines.device` of
        `config` selects on it."""
        from megatron_async.engines.sglang.process import resolve_device

        cores = os.cpu_count()
        if resolve_device(config.engines) == "cpu":
            return cls("cpu", cores=cores)
        if not sees_gpu():
            # engines.device requires a GPU, but this machine has none. A later check refuses the
            # run. Until then, the GPU of the default settings of `simulate` is assumed.
            return replace(cls.of_nodes(1, 1), cores=cores)
        import torch

        properties = torch.cuda.get_device_properties(0)
        return cls("cuda", _sheet_of(properties.name), float(properties.total_memory), cores)

    @classmethod
    def of_nodes(cls, gpus: int, engine_nodes: int, gpu: GpuConfig = _ANY_GPU) -> "Machine":
        """Return the hardware of nodes that are not this machine, such as the nodes of a cluster.

        Args:
            gpus: Number of GPUs of a node; 0 means that engines run on the CPU.
            engine_nodes: Number of nodes that run engines.
            gpu: The kind of GPU.
        """
        if not gpus:
            return cls("cpu", engine_nodes=engine_nodes)
        return cls("cuda", gpu.name, gpu_of(gpu).memory, engine_nodes=engine_nodes)

    @property
    def title(self) -> str:
        """Name of the hardware for messages, for example "H100 with 80 GB" or "CPU"."""
        if self.device == "cpu":
            return "CPU"
        return f"{self.gpu or 'GPU'} with {self.memory_bytes / _GB:.0f} GB"


@dataclass(frozen=True)
class Derived:
    """One setting that has a rule in `_RULES`, with its value and the reason for the value.

    Attributes:
        name: Dotted name of the setting.
        value: The derived value, or the value that the user has set.
        reason: Reason why it has this value, for messages.
        changed: Whether a derived value replaced the default.
    """

    name: str
    value: Any
    reason: str
    changed: bool = False

    def __str__(self) -> str:
        value = "none" if self.value is None else self.value
        return f"{self.name} = {value}: {self.reason}"


@dataclass(frozen=True)
class DerivedRun:
    """Result of `derive`: a run's configuration with derived settings, and the reason for each of
    them.

    Attributes:
        config: The run's configuration with derived values.
        settings: All settings that have a rule in `_RULES`, including those that the user has set.
    """

    config: RunConfig
    settings: tuple[Derived, ...]

    def lines(self) -> list[str]:
        """Return one line for each setting in `settings`."""
        return [str(setting) for setting in self.settings]

    def changes(self) -> list[str]:
        """Return one line for each setting whose default was replaced."""
        return [str(setting) for setting in self.settings if setting.changed]


def derive(config: RunConfig, machine: Machine) -> DerivedRun:
    """Derive from `machine` and the other settings each setting in `_RULES` that no file, recipe,
    preset or command line has set; return the new settings with a reason for each."""
    found: list[Derived] = []
    # Later rules read the results of earlier ones, so the order of `_RULES` matters.
    for name, rule in _RULES.items():
        section, field = name.split(".")
        settings = getattr(config, section)
        value = getattr(settings, field)
        if field in settings.model_fields_set:
            found.append(Derived(name, value, _SET))
            continue
        new, reason = rule(config, machine)
        found.append(Derived(name, new, reason, changed=new != value))
        if new != value:
            config = config.with_section(section, **{field: new})
    return DerivedRun(config, tuple(found))


def _max_total_tokens(config: RunConfig, machine: Machine) -> tuple[int | None, str]:
    if machine.device == "cpu":
        return (
            config.engines.max_total_tokens,
            "engines share the host's memory with other processes",
        )
    return None, f"SGLang uses the memory of the {machine.title} that weights leave free"


def _concurrency(config: RunConfig, machine: Machine) -> tuple[int | str, str]:
    default = config.schedule.concurrency
    if machine.device == "cpu":
        return default, "the default for CPU engines"
    simulation = modeled(config, machine)
    try:
        found = sufficient_concurrency(simulation)
    except UserError as error:
        return default, f"the default, because the model's shape is unknown ({error})"
    if found is None:
        return (
            default,
            f"the default, because simulated engines of this size do not fit on {machine.title}",
        )
    return found, (
        "the smallest number with 95 % of the generation speed that the KV cache allows, according "
        f"to the planner's model of {machine.title} and assumed "
        f"{simulation.simulate.lengths.distribution} lengths"
    )


def _cuda_graph_batch(config: RunConfig, machine: Machine) -> tuple[int | None, str]:
    if machine.device == "cpu":
        return None, "a CPU has no CUDA graphs"
    concurrency, count = config.schedule.concurrency, config.engines.count
    if isinstance(concurrency, str):
        return None, "SGLang's default, because schedule.concurrency auto has no limit in advance"
    each = math.ceil(concurrency / count)
    limit = config.engines.max_running_requests
    each = each if limit is None else min(each, limit)
    return math.ceil(each / _GRAPH_STEP) * _GRAPH_STEP, (
        f"{each} requests per engine (schedule.concurrency {concurrency} over {count}); larger "
        "decode batches would run without graphs"
    )


def _recompute(config: RunConfig, machine: Machine) -> tuple[Recompute, str]:
    if machine.device == "cpu":
        return config.trainer.recompute, "the default for CPU engines"
    simulation = modeled(config, machine)
    try:
        shape = shape_of(simulation)
    except UserError as error:
        return (
            config.trainer.recompute,
            f"the default, because the model's shape is unknown ({error})",
        )
    shared = config.engines.placement == "colocated"
    found = fitting_recompute(simulation, shape, machine.memory_bytes)
    if found is None:
        return "all", "according to the estimate, less recomputation does not fit"
    peak = memory_of_trainer(simulation, shape, found).peak / _GB
    return found, (
        f"the least recomputation that fits: the estimated peak is {peak:.1f} GB, and the limit is "
        f"{simulation.simulate.trainer_memory_share:g} of {machine.title}"
        f"{', minus 5 GB for a paused engine' if shared else ''}"
    )


def _start_timeout(config: RunConfig, machine: Machine) -> tuple[float, str]:
    if machine.device == "cpu":
        return (
            config.engines.start_timeout_seconds,
            "the default for CPU engines, which compile nothing",
        )
    return _GPU_START_SECONDS, "the first start compiles kernels and captures CUDA graphs"


def _scorer_workers(config: RunConfig, machine: Machine) -> tuple[int, str]:
    base = config.task.scorer_workers
    if machine.cores is None:
        return base * max(1, machine.engine_nodes), f"{base} per node with engines"
    half = machine.cores // 2
    return max(
        base, half
    ), f"half of {machine.cores} cores, at least {base}; idle workers are ended"


_Rule = Callable[[RunConfig, Machine], tuple[Any, str]]
_RULES: Final[dict[str, _Rule]] = {
    "engines.max_total_tokens": _max_total_tokens,
    "schedule.concurrency": _concurrency,
    "engines.cuda_graph_batch": _cuda_graph_batch,
    "engines.start_timeout_seconds": _start_timeout,
    "trainer.recompute": _recompute,
    "task.scorer_workers": _scorer_workers,
}


def layout_lines(config: RunConfig, machine: Machine) -> list[str]:
    """Return lines that describe layout, GPUs, batch and estimated memory. The user should read
    them before a job is queued."""
    parallel, engines, schedule = config.parallel, config.engines, config.schedule
    units = "GPUs" if machine.device == "cuda" else "ranks"
    lines = [
        f"trainer: {parallel.ranks} {units} on {parallel.nodes} node(s), TP {parallel.tensor} x PP "
        f"{parallel.pipeline} x CP {parallel.context} x DP {parallel.data}, EP {parallel.expert}",
        f"engines: {engines.count} of TP {engines.tensor}, {engines.placement}{_shared(config)}",
        f"batch: {schedule.groups_per_batch} groups of {schedule.group_size}, "
        f"{config.updates_per_step} update(s); microbatches of "
        f"{config.trainer.microbatch_tokens} tokens",
    ]
    if machine.device == "cpu":
        return lines
    try:
        shape = shape_of(config)
    except UserError as error:
        return [*lines, f"memory: not estimated ({error})"]
    return [*lines, *_memory_lines(config, machine, shape)]


def check_memory(config: RunConfig, machine: Machine) -> None:
    """Raise UserError if weights and optimizer state do not fit into the memory of a GPU, or if
    SGLang's share of the memory leaves too little for a weight update.

    With Adam, the weights and the optimizer state of a trainer are checked; without quantization,
    the weights of an engine. Less certain estimates, such as the memory of activations, never cause
    a refusal. On the CPU, nothing is checked. If the model's shape is unknown, weights are not.
    """
    if machine.device == "cpu":
        return
    _check_engine_share(config, machine)
    try:
        shape = shape_of(config)
    except UserError:
        return
    tensor, pipeline = config.parallel.tensor, config.parallel.pipeline
    if config.optimizer.name == "adam":
        layout = f"parallel.tensor {tensor} x parallel.pipeline {pipeline}: a trainer's state"
        state = memory_of_trainer(modeled(config, machine), shape).state
        _check_fits(state, layout, "parallel.tensor or parallel.pipeline", machine)
    if config.engines.quantization == "none":
        layout = f"engines.tensor {config.engines.tensor}: an engine's weights"
        _check_fits(_engine_weights(config, shape), layout, "engines.tensor", machine)


def _check_fits(needed: float, layout: str, remedy: str, machine: Machine) -> None:
    """Raise UserError if `needed` bytes exceed the memory of one GPU.

    Args:
        needed: Bytes that are needed.
        layout: Beginning of the message: the settings that determine the size, and what needs the
            bytes, for example `engines.tensor 1: an engine's weights`.
        remedy: The settings that the message advises to raise.
        machine: The node that the run uses.
    """
    if needed > machine.memory_bytes:
        raise UserError(
            f"{layout} would need {needed / _GB:.1f} GB of a {machine.title}. Raise {remedy}, "
            "or name the GPU of the cluster's nodes by launch --gpu."
        )


def _check_engine_share(config: RunConfig, machine: Machine) -> None:
    """Raise UserError if `engines.extra_args` sets SGLang's share of the GPU memory
    (--mem-fraction-static) and the rest is too small for a weight update."""
    arguments = [word for text in config.engines.extra_args for word in text.split("=", 1)]
    if _SHARE not in arguments[:-1]:
        return
    share = arguments[arguments.index(_SHARE) + 1]
    try:
        remaining, needed = (1 - float(share)) * machine.memory_bytes, _update_bytes(config)
    except ValueError as error:
        raise UserError(
            f"engines.extra_args has {_SHARE} {share}, which is not a number"
        ) from error
    if remaining < needed:
        raise UserError(
            f"engines.extra_args has {_SHARE} {share}, which leaves {remaining / _GB:.1f} GB of "
            f"the {machine.title}; a weight update needs {needed / _GB:.1f} GB. Lower {_SHARE} or "
            "weights.bucket_mib."
        )


def _update_bytes(config: RunConfig) -> float:
    """Estimate the bytes of GPU memory that an engine needs in addition during a `distributed`
    weight update; 0 for other transports, or if the model's shape is unknown."""
    if config.weights.transport != "distributed":
        return 0.0
    try:
        shape = shape_of(config)
    except UserError:
        return 0.0
    return update_bytes(shape, config.weights.bucket_mib << 20, config.parallel.pipeline)


def _shared(config: RunConfig) -> str:
    """Return a clause that names the trainer ranks whose GPUs the engines share; empty if they
    share none."""
    if config.engines.placement != "colocated":
        return ""
    sharing = (trainer_ranks_of(e, config.engines.tensor) for e in range(config.engines.count))
    names = ", ".join("+".join(map(str, ranks)) for ranks in sharing)
    return f" on the GPUs of trainer ranks {names}; ranks and engines use the memory alternately"


def _engine_weights(config: RunConfig, shape: ModelShape) -> float:
    """Return the bytes of weights on each GPU of an engine."""
    return 2 * shape.parameters / config.engines.tensor


def _memory_lines(config: RunConfig, machine: Machine, shape: ModelShape) -> list[str]:
    """Return two lines: the estimated memory of a trainer GPU and the estimated memory of an engine
    GPU."""
    simulation, weights = modeled(config, machine), _engine_weights(config, shape)
    trainer, share = memory_of_trainer(simulation, shape), simulation.simulate.engine_memory_share
    update = _update_bytes(config)
    for_update = f"a weight update {update / _GB:.1f} GB, " if update else ""
    tokens = kv_capacity_tokens(shape, machine.memory_bytes, share, config.engines.tensor, 0.0)
    warning = ""
    if trainer.peak > machine.memory_bytes:
        warning = (
            ", which is too much: raise trainer.recompute, up to all; then lower "
            "trainer.microbatch_tokens, or raise parallel.tensor"
        )
    return [
        f"memory of a trainer GPU, estimated: state {trainer.state / _GB:.1f} GB, and activations "
        f"{trainer.activations / _GB:.1f} GB or the optimizer's step "
        f"{trainer.optimizer_step / _GB:.1f} GB, peak {trainer.peak / _GB:.1f} of "
        f"{machine.memory_bytes / _GB:.0f} GB{warning}",
        f"memory of an engine GPU, estimated: weights {weights / _GB:.1f} GB, {for_update}"
        f"KV cache of {max(0, tokens):,} tokens per engine",
    ]


def modeled(config: RunConfig, machine: Machine) -> SimulationConfig:
    """Return the settings of a simulation of the run `config` on `machine`."""
    simulation, placement = simulation_of(config), config.engines.placement
    gpu = simulation.simulate.gpu
    changes = {"name": machine.gpu or gpu.name, "memory_gb": machine.memory_bytes / _GB}
    gpu = gpu.model_copy(update=changes)
    return simulation.with_section("simulate", gpu=gpu, placement=placement, offload=True)


def _sheet_of(device_name: str) -> GpuName | None:
    """Return the name of the GPU in `DATA_SHEETS` that is part of `device_name`, the name that CUDA
    reports; None if no name is."""
    return next((name for name in DATA_SHEETS if name in device_name), None)
