"""Estimates for a run on GPUs: memory, checkpoints, the time of a stop and of a step.

The estimates have three uses:
- Commands print them: `launch --dry-run`, `train --dry-run`, `doctor --config` and `simulate
  --figures`. The header of each shipped configuration file contains the output of the last one.
- The Slurm job script must stop the run in time. Slurm sends the stop signal before the job's time
  limit, earlier by the estimated time of a stop plus `END_SECONDS`.
- Every start is refused if the disk has too little free space for the checkpoints, or if writing
  one takes longer than `checkpoint.timeout_seconds`.

After the stop signal, the run ends its current step and then saves a checkpoint. If a checkpoint
was being written at the signal, the last one is written after it. So a stop takes at most the time
of a step or of a save, whichever is longer, plus the time of another save.

Invariants
- Rates are settings of the run (`checkpoint.write_gb_per_s`) or assumptions of the simulator;
  nothing is measured here.
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

# Longest time that train.sbatch needs after the trainers have ended: it ends the other processes
# and queues the job again.
END_SECONDS: Final = 90
# Smallest result of `stop_seconds`. It covers what is not estimated: the time of a step on a CPU,
# checkpoints of models of unknown shape, and fixed costs, which dominate for small models.
_MIN_STOP_SECONDS: Final = 90
_GB: Final = 1e9
_STEPS: Final = 1000


@dataclass(frozen=True)
class Checkpoints:
    """Estimated size of a run's checkpoints.

    Attributes:
        size: Bytes of one checkpoint.
        write_seconds: Time to write one checkpoint.
        limit: Largest number of checkpoints on disk at once, including one that is being written.
    """

    size: float
    write_seconds: float
    limit: int

    @classmethod
    def of(cls, config: RunConfig, shape: ModelShape) -> Checkpoints:
        """Estimate the checkpoints of a run whose model has this shape.

        Raises:
            UserError: Writing one takes longer than `checkpoint.timeout_seconds`.
        """
        settings, size = config.checkpoint, checkpoint_bytes(shape)
        write = size / (settings.write_gb_per_s * _GB)
        if write > settings.timeout_seconds:
            raise UserError(
                f"checkpoint.timeout_seconds is {settings.timeout_seconds:g}, but writing a "
                f"checkpoint of {size / _GB:.0f} GB takes {write:.0f} s at "
                "checkpoint.write_gb_per_s "
                f"{settings.write_gb_per_s:g}. Raise checkpoint.timeout_seconds, or correct "
                "checkpoint.write_gb_per_s."
            )
        return cls(size, write, min(settings.keep + 1, -(-config.steps // settings.every_steps)))

    def check_free_space(self, directory: RunDirectory) -> None:
        """Raise UserError if the disk of the run directory has too little space for the
        checkpoints.

        The space of the run's existing checkpoints counts as free, because new ones will replace
        them.
        """
        folder = directory.checkpoints
        free = sum(file.stat().st_size for file in folder.rglob("*.safetensors"))
        free += shutil.disk_usage(existing(folder)).free
        if free < self.limit * self.size:
            raise UserError(
                f"{folder} has free space for {free / _GB:,.3g} GB of checkpoints, but will "
                f"contain {self.limit} of {self.size / _GB:,.3g} GB at once (checkpoint.keep, and "
                "one that "
                "is being written). Lower checkpoint.keep, or set root to another file system."
            )


def estimate_lines(config: RunConfig, machine: Machine) -> list[str]:
    """Return lines that describe layout and memory and, on GPUs, estimated storage and times."""
    lines = layout_lines(config, machine)
    if machine.device == "cpu":
        return lines
    simulation = modeled(config, machine)
    try:
        return [*lines, *_storage_and_times(simulation, shape_of(simulation), machine)]
    except UserError as error:
        return [*lines, f"storage and times: not estimated ({error})"]


def _storage_and_times(config: SimulationConfig, shape: ModelShape, machine: Machine) -> list[str]:
    """Return lines with the estimated size of checkpoints, the estimated times of a start, a stop
    and a weight update, and the results of simulated steps."""
    checkpoints, layout = Checkpoints.of(config, shape), config.parallel
    stop = stop_seconds(config, checkpoints, machine)
    # All nodes read the weights from one file system. Each node reads the weights of its own ranks,
    # and each weight only once.
    share = min(1.0, layout.ranks / layout.nodes / (layout.tensor * layout.pipeline))
    read = layout.nodes * share * BF16 * shape.parameters
    rate = config.checkpoint.write_gb_per_s
    gpus = layout.ranks
    if config.engines.placement == "disaggregated":
        gpus += config.engines.count * config.engines.tensor
    found = simulate(config)
    hours = _STEPS * found.step_seconds / 3600 * gpus
    return [
        *_recomputation(config, shape),
        f"checkpoint: {checkpoints.size / _GB:,.0f} GB, written in {checkpoints.write_seconds:.0f} "
        f"s at {rate:g} GB/s (checkpoint.write_gb_per_s); up to {checkpoints.limit} at once, "
        f"{checkpoints.limit * checkpoints.size / 1e12:.2f} TB of free space",
        f"start: trainers read {read / _GB:,.0f} GB of weights, {read / _GB / rate:.0f} s at that "
        "rate",
        f"stop: up to {stop} s, and {END_SECONDS} s to end the job, so Slurm sends the signal "
        f"{stop + END_SECONDS} s before the time limit",
        f"weight update: {trainer_costs(config).publish_seconds:.1f} s",
        f"simulated: {found.step_seconds:.1f} s per step, {found.tokens_per_second:,.0f} trained "
        f"tokens/s, idle {100 * found.gpu_idle:.0f} % of all GPUs, lag {found.lag_mean:.1f}; "
        f"{_STEPS:,} steps take {hours:,.0f} GPU-hours",
    ]


def _recomputation(config: SimulationConfig, shape: ModelShape) -> list[str]:
    """Return one line with the value of `trainer.recompute` and the estimated time of training with
    it and with "all"; return no line if it is "all"."""
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
    """Estimate the run's checkpoints and check that the disk has space for them.

    Returns:
        The estimates; None if the shape of the model is unknown.

    Raises:
        UserError: The disk has too little space, or writing one takes longer than allowed.
    """
    try:
        shape = shape_of(config)
    # The model may be of a user's own family, whose config.json has other names for its sizes.
    except UserError:
        return None
    found = Checkpoints.of(config, shape)
    found.check_free_space(directory)
    return found


def stop_seconds(config: RunConfig, checkpoints: Checkpoints | None, machine: Machine) -> int:
    """Return the estimated longest time, in seconds, from the stop signal until the last checkpoint
    is complete."""
    if checkpoints is None:
        return _MIN_STOP_SECONDS
    step = training_seconds(modeled(config, machine)) if machine.device == "cuda" else 0.0
    running_save = checkpoints.write_seconds if config.checkpoint.asynchronous else 0.0
    found = math.ceil(max(step, running_save) + checkpoints.write_seconds)
    return max(_MIN_STOP_SECONDS, found)
