"""Settings that follow from the machine and the model, unless they are set.

The defaults in `config/` are a laptop's. `derive` replaces those that nobody has set (no file,
recipe, preset or command line) by what suits the machine that the run is for; `train`, `launch`,
`doctor --config` and `settings` all show and use this one result.

Invariants
- A setting that is set is never changed.
- On a CPU nothing changes: the defaults are for it.
- Pure: the same configuration and machine give the same result. A run keeps in its config.yaml what
  was derived at its start, so that resuming it on another machine changes nothing.
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
_SET: Final = "as set (file, command line, recipe or preset)"


@dataclass(frozen=True)
class Machine:
    """Hardware of one node of a run. `memory_bytes` of one GPU; `cores` None: not known."""

    device: Literal["cpu", "cuda"]
    gpu: GpuName | None = None
    memory_bytes: float = 0.0
    cores: int | None = None
    engine_nodes: int = 1

    @classmethod
    def here(cls, config: RunConfig) -> "Machine":
        """This one, as its engines would be started."""
        from megatron_async.engines.sglang.process import resolve_device

        cores = os.cpu_count()
        if resolve_device(config.engines) == "cpu":
            return cls("cpu", cores=cores)
        if not sees_gpu():  # asked for by engines.device, and refused later
            return replace(cls.of_nodes(1, 1), cores=cores)
        import torch

        properties = torch.cuda.get_device_properties(0)
        return cls("cuda", _sheet_of(properties.name), float(properties.total_memory), cores)

    @classmethod
    def of_nodes(cls, gpus: int, engine_nodes: int, gpu: GpuConfig = _ANY_GPU) -> "Machine":
        """Return a node elsewhere with so many of this GPU, or without any."""
        if not gpus:
            return cls("cpu", engine_nodes=engine_nodes)
        return cls("cuda", gpu.name, gpu_of(gpu).memory, engine_nodes=engine_nodes)

    @property
    def title(self) -> str:
        if self.device == "cpu":
            return "CPU"
        return f"{self.gpu or 'GPU'} with {self.memory_bytes / _GB:.0f} GB"


@dataclass(frozen=True)
class Derived:
    """A setting, its value, and the reason."""

    name: str
    value: Any
    reason: str
    changed: bool = False

    def __str__(self) -> str:
        shown = "none" if self.value is None else self.value
        return f"{self.name} = {shown}: {self.reason}"


@dataclass(frozen=True)
class DerivedRun:
    """The configuration that runs, and every derived setting (also those that were set)."""

    config: RunConfig
    settings: tuple[Derived, ...]

    def lines(self) -> list[str]:
        """Every derived setting."""
        return [str(setting) for setting in self.settings]

    def changes(self) -> list[str]:
        """Return the settings that are not the default on this machine."""
        return [str(setting) for setting in self.settings if setting.changed]


def derive(config: RunConfig, machine: Machine) -> DerivedRun:
    """The run as it starts on `machine`."""
    found: list[Derived] = []
    for name, rule in _RULES.items():  # in this order: later ones read what earlier ones set
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
        return config.engines.max_total_tokens, "engines share host memory with all else"
    return None, f"SGLang takes what weights leave of the {machine.title}"


def _concurrency(config: RunConfig, machine: Machine) -> tuple[int | str, str]:
    default = config.schedule.concurrency
    if machine.device == "cpu":
        return default, "the default for CPU engines"
    simulation = modeled(config, machine)
    try:
        found = sufficient_concurrency(simulation)
    except UserError as error:
        return default, f"the default, as the model's shape is not known ({error})"
    if found is None:
        return (
            default,
            f"the default: simulated engines of this size have no room on {machine.title}",
        )
    return found, (
        "the smallest with 95 % of the generation speed that the KV cache allows, in the planner's "
        f"model of {machine.title} and lengths {simulation.simulate.lengths.distribution} (assumed)"
    )


def _cuda_graph_batch(config: RunConfig, machine: Machine) -> tuple[int | None, str]:
    if machine.device == "cpu":
        return None, "no CUDA graphs on a CPU"
    concurrency, count = config.schedule.concurrency, config.engines.count
    if isinstance(concurrency, str):
        return None, "SGLang's own: schedule.concurrency auto sets no limit beforehand"
    each = math.ceil(concurrency / count)
    limit = config.engines.max_running_requests
    each = each if limit is None else min(each, limit)
    return math.ceil(each / _GRAPH_STEP) * _GRAPH_STEP, (
        f"{each} requests an engine (schedule.concurrency {concurrency} over {count}); larger "
        "decode batches would run without graphs"
    )


def _recompute(config: RunConfig, machine: Machine) -> tuple[Recompute, str]:
    if machine.device == "cpu":
        return config.trainer.recompute, "the default with engines on CPUs"
    simulation = modeled(config, machine)
    try:
        shape = shape_of(simulation)
    except UserError as error:
        return config.trainer.recompute, f"the default, as the model's shape is not known ({error})"
    shared = config.engines.placement == "colocated"
    found = fitting_recompute(simulation, shape, machine.memory_bytes)
    if found is None:
        return "all", "nothing less fits, by the estimate"
    peak = memory_of_trainer(simulation, shape, found).peak / _GB
    return found, (
        f"the least that fits: an estimated peak of {peak:.1f} GB, at most "
        f"{simulation.simulate.trainer_memory_share:g} of {machine.title}"
        f"{', less 5 GB for a paused engine' if shared else ''}"
    )


def _start_timeout(config: RunConfig, machine: Machine) -> tuple[float, str]:
    if machine.device == "cpu":
        return config.engines.start_timeout_seconds, "CPU engines compile nothing"
    return _GPU_START_SECONDS, "a first start compiles kernels and captures CUDA graphs"


def _scorer_workers(config: RunConfig, machine: Machine) -> tuple[int, str]:
    base = config.task.scorer_workers
    if machine.cores is None:
        return base * max(1, machine.engine_nodes), f"{base} a node that generates"
    half = machine.cores // 2
    return max(base, half), f"half of {machine.cores} cores, {base} at least; idle ones are ended"


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
    """Layout, GPUs, batch and memory, for a person to check before anything is queued."""
    parallel, engines, schedule = config.parallel, config.engines, config.schedule
    what = "GPUs" if machine.device == "cuda" else "ranks"
    lines = [
        f"trainer: {parallel.ranks} {what} on {parallel.nodes} node(s), TP {parallel.tensor} x PP "
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
    """Check that weights and optimizer alone fit, and SGLang's share where it is set.

    What is estimated, as activations, refuses nothing. Raises UserError.
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
        layout = f"parallel.tensor {tensor} x pipeline {pipeline}: a trainer's state"
        state = memory_of_trainer(modeled(config, machine), shape).state
        _check_held(state, layout, "them", machine)
    if config.engines.quantization == "none":
        layout = f"engines.tensor {config.engines.tensor}: an engine's weights"
        _check_held(_engine_weights(config, shape), layout, "it", machine)


def _check_held(held: float, layout: str, remedy: str, machine: Machine) -> None:
    if held > machine.memory_bytes:
        raise UserError(
            f"{layout} would take {held / _GB:.1f} GB of a {machine.title}: raise {remedy}, "
            "or name the GPU of those nodes by launch --gpu"
        )


def _check_engine_share(config: RunConfig, machine: Machine) -> None:
    arguments = [part for one in config.engines.extra_args for part in one.split("=", 1)]
    if _SHARE not in arguments[:-1]:
        return
    share = arguments[arguments.index(_SHARE) + 1]
    try:
        left, needed = (1 - float(share)) * machine.memory_bytes, _update_bytes(config)
    except ValueError as error:
        raise UserError(f"engines.extra_args has {_SHARE} {share}, which is no number") from error
    if left < needed:
        raise UserError(
            f"engines.extra_args has {_SHARE} {share}, which leaves {left / _GB:.1f} GB of the "
            f"{machine.title}, and a weight update needs {needed / _GB:.1f} GB: lower it, or "
            "weights.bucket_mib"
        )


def _update_bytes(config: RunConfig) -> float:
    """Bytes of an update on an engine's GPU; 0: other ways, and models of unknown shape."""
    if config.weights.transport != "distributed":
        return 0.0
    try:
        shape = shape_of(config)
    except UserError:
        return 0.0
    return update_bytes(shape, config.weights.bucket_mib << 20, config.parallel.pipeline)


def _shared(config: RunConfig) -> str:
    """Name the trainer ranks whose GPUs engines share, if they do."""
    if config.engines.placement != "colocated":
        return ""
    sharing = (trainer_ranks_of(e, config.engines.tensor) for e in range(config.engines.count))
    shown = ", ".join("+".join(map(str, ranks)) for ranks in sharing)
    return f" on the GPUs of trainer ranks {shown}, which give all memory in turns"


def _engine_weights(config: RunConfig, shape: ModelShape) -> float:
    return 2 * shape.parameters / config.engines.tensor


def _memory_lines(config: RunConfig, machine: Machine, shape: ModelShape) -> list[str]:
    simulation, weights = modeled(config, machine), _engine_weights(config, shape)
    trainer, share = memory_of_trainer(simulation, shape), simulation.simulate.engine_memory_share
    update = _update_bytes(config)
    beside = f"a weight update {update / _GB:.1f} GB, " if update else ""
    tokens = kv_capacity_tokens(shape, machine.memory_bytes, share, config.engines.tensor, 0.0)
    over = ""
    if trainer.peak > machine.memory_bytes:
        over = (
            ", which is too much: raise trainer.recompute, up to all; then lower "
            "trainer.microbatch_tokens, or raise parallel.tensor"
        )
    return [
        f"memory of a trainer GPU, estimated: state {trainer.state / _GB:.1f} GB, and activations "
        f"{trainer.activations / _GB:.1f} GB or the optimizer's step "
        f"{trainer.optimizer_step / _GB:.1f} GB, peak {trainer.peak / _GB:.1f} of "
        f"{machine.memory_bytes / _GB:.0f} GB{over}",
        f"memory of an engine GPU, estimated: weights {weights / _GB:.1f} GB, {beside}KV of "
        f"{max(0, tokens):,} tokens an engine",
    ]


def modeled(config: RunConfig, machine: Machine) -> SimulationConfig:
    """Return the simulation of the run as it is: on this machine, with its placement."""
    simulation, placement = simulation_of(config), config.engines.placement
    gpu = simulation.simulate.gpu
    changes = {"name": machine.gpu or gpu.name, "memory_gb": machine.memory_bytes / _GB}
    gpu = gpu.model_copy(update=changes)
    return simulation.with_section("simulate", gpu=gpu, placement=placement, offload=True)


def _sheet_of(device_name: str) -> GpuName | None:
    """The data sheet of a device as CUDA names it."""
    return next((name for name in DATA_SHEETS if name in device_name), None)
