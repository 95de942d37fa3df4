"""Arithmetic about a run on GPUs: memory, checkpoints, the time of a stop and of a step.

`launch --dry-run`, `train --dry-run` and `doctor` show it (`figures`), the header of each shipped
file is `simulate --figures` of it, the job script has the time of a stop from here, and a start
compares the room on disk.

A stop that Slurm asks for costs at most the step under way, and then a save. A save that was under
way at the signal goes on during that step, and must have ended before the next one begins.

Invariants
- Rates are settings of the run (`checkpoint.write_gb_per_s`) or assumptions of the simulator;
  nothing here is measured.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass
from typing import Final

from megatron_async.config import RunConfig
from megatron_async.config.simulate import SimulationConfig
from megatron_async.errors import UserError
from megatron_async.files.mounts import existing
from megatron_async.launcher.derived import Machine, layout_lines, modeled
from megatron_async.models.shape import BF16, ModelShape, shape_of
from megatron_async.run_directory import RunDirectory
from megatron_async.simulate.build import simulate, trainer_costs
from megatron_async.simulate.memory import checkpoint_bytes
from megatron_async.simulate.planner import training_seconds

# What train.sbatch needs at most after the trainers' end: to end the rest, and to be queued again.
END_SECONDS: Final = 90
# On a CPU, where no step is estimated, and of small models.
_LEAST_STOP_SECONDS: Final = 90
_GB: Final = 1e9
_STEPS: Final = 1000


@dataclass(frozen=True)
class Checkpoints:
    """Bytes of one, seconds of writing it, and how many lie on disk at once."""

    size: float
    write_seconds: float
    most: int

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> Checkpoints:
        """Bytes of the checkpoints that are kept and of one being written. Raises UserError."""
        settings, size = config.checkpoint, checkpoint_bytes(shape)
        write = size / (settings.write_gb_per_s * _GB)
        if write > settings.timeout_seconds:
            raise UserError(
                f"checkpoint.timeout_seconds is {settings.timeout_seconds:g}, and writing one of "
                f"{size / _GB:.0f} GB takes {write:.0f} s at checkpoint.write_gb_per_s "
                f"{settings.write_gb_per_s:g}: raise the first, or the second if that is wrong"
            )
        return cls(size, write, min(settings.keep + 1, -(-config.steps // settings.every_steps)))

    def check_free_space(self, directory: RunDirectory) -> None:
        """Check that there is room for them, beside those that lie there. Raises UserError."""
        place = directory.checkpoints
        room = sum(file.stat().st_size for file in place.rglob("*.safetensors"))
        room += shutil.disk_usage(existing(place)).free
        if room < self.most * self.size:
            raise UserError(
                f"{self.most} checkpoints of {self.size / _GB:,.3g} GB lie in "
                f"{directory.checkpoints} at once (checkpoint.keep, and the one that is written), "
                f"and there is room for {room / _GB:,.3g} GB: lower checkpoint.keep, or set root "
                "to another file system"
            )


def estimate_lines(config: RunConfig, machine: Machine) -> list[str]:
    """Layout, memory, and on GPUs storage and times, in lines for a person."""
    lines = layout_lines(config, machine)
    if machine.device == "cpu":
        return lines
    simulation = modeled(config, machine)
    try:
        return [*lines, *_storage_and_times(simulation, shape_of(simulation), machine)]
    except UserError as error:
        return [*lines, f"storage and times: not estimated ({error})"]


def _storage_and_times(config: SimulationConfig, shape: ModelShape, machine: Machine) -> list[str]:
    checkpoints, layout = Checkpoints.of(config, shape), config.parallel
    stop = stop_seconds(config, checkpoints, machine)
    # A node reads what its ranks hold once, from a file system that all nodes share.
    held = min(1.0, layout.ranks / layout.nodes / (layout.tensor * layout.pipeline))
    read = layout.nodes * held * BF16 * shape.parameters
    rate = config.checkpoint.write_gb_per_s
    gpus = layout.ranks
    if config.engines.placement == "disaggregated":
        gpus += config.engines.count * config.engines.tensor
    found = simulate(config)
    hours = _STEPS * found.step_seconds / 3600 * gpus
    return [
        *_recomputation(config, shape),
        f"checkpoint: {checkpoints.size / _GB:,.0f} GB, written in {checkpoints.write_seconds:.0f} "
        f"s at {rate:g} GB/s (checkpoint.write_gb_per_s); up to {checkpoints.most} at once, "
        f"{checkpoints.most * checkpoints.size / 1e12:.2f} TB of free space",
        f"start: trainers read {read / _GB:,.0f} GB of weights, {read / _GB / rate:.0f} s at that "
        "rate",
        f"stop: up to {stop} s, and {END_SECONDS} s to end the job: Slurm signals "
        f"{stop + END_SECONDS} s before its limit",
        f"weight update: {trainer_costs(config).publish_seconds:.1f} s",
        f"simulated: {found.step_seconds:.1f} s a step, {found.tokens_per_second:,.0f} trained "
        f"tokens/s, idle {100 * found.gpu_idle:.0f} % of all GPUs, lag {found.lag_mean:.1f}; "
        f"{_STEPS:,} steps take {hours:,.0f} GPU-hours",
    ]


def _recomputation(config: SimulationConfig, shape: ModelShape) -> list[str]:
    """Return a line on `trainer.recompute` and the time that it saves."""
    recompute, layers = config.trainer.recompute, shape.layers // config.parallel.pipeline
    if recompute == "all":
        return []
    parts = {"none": "nothing", "feed_forward": "the feed-forward part of every layer"}
    part = parts.get(str(recompute), f"{recompute} of {layers} layers of each stage")
    whole = training_seconds(config.with_section("trainer", recompute="all"))
    seconds = training_seconds(config)
    return [
        f"recomputed in the backward pass: {part} (trainer.recompute {recompute}); training "
        f"on a batch and the weight update take {seconds:.1f} s, and with all layers {whole:.1f} s"
    ]


def checkpoints_with_room(config: RunConfig, directory: RunDirectory) -> Checkpoints | None:
    """The run's checkpoints; None where the shape of its model is not known. Raises UserError."""
    try:
        shape = shape_of(config)
    except UserError:  # a family of the user's own, with names of its own in config.json
        return None
    found = Checkpoints.of(config, shape)
    found.check_free_space(directory)
    return found


def stop_seconds(config: RunConfig, checkpoints: Checkpoints | None, machine: Machine) -> int:
    """Longest time from the signal to a finalized checkpoint."""
    if checkpoints is None:
        return _LEAST_STOP_SECONDS
    step = training_seconds(modeled(config, machine)) if machine.device == "cuda" else 0.0
    under_way = checkpoints.write_seconds if config.checkpoint.asynchronous else 0.0
    found = math.ceil(max(step, under_way) + checkpoints.write_seconds)
    return max(_LEAST_STOP_SECONDS, found)
