"""Split of one machine's GPUs into those that train and those that generate; is Ray used there?

A place hands out the GPUs that it was opened with, and torchrun's ranks count from the first that
they see: without a split both would begin with the same one.

Nothing here starts or writes anything: commands ask before they make a run directory.
"""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron_async.config import RunConfig
from megatron_async.engines.sglang.process import resolve_device
from megatron_async.errors import UserError
from megatron_async.process_backends.local import visible_gpus
from megatron_async.runtime.gpus import sees_gpu

RUNNING_RAY_VARIABLE: Final = "RAY_ADDRESS"  # of a cluster that runs already


def uses_ray(config: RunConfig) -> bool:
    """Return whether a run on one machine is in a Ray cluster, as `cluster` asks for it."""
    running = bool(os.environ.get(RUNNING_RAY_VARIABLE))
    return config.cluster == "ray" or (config.cluster == "auto" and running)


def check_ray(config: RunConfig, nodes: int = 1) -> None:
    """Check that Ray is installed where it is used. Raises UserError."""
    if (nodes > 1 or uses_ray(config)) and importlib.util.find_spec("ray") is None:
        wanted = f"{nodes} nodes are" if nodes > 1 else f"cluster {config.cluster} is"
        raise UserError(
            f"{wanted} used through Ray, which is not installed: pip install "
            '"megatron_async[cluster]", or set cluster local on one machine'
        )


def running_ray(config: RunConfig) -> str | None:
    """The Ray cluster that runs already and that a run on one machine uses; None: there is none."""
    return os.environ.get(RUNNING_RAY_VARIABLE) or None if uses_ray(config) else None


@dataclass(frozen=True)
class DeviceSplit:
    """Values of CUDA_VISIBLE_DEVICES; both None where there is nothing to divide."""

    trainers: str | None = None
    engines: str | None = None


def split_devices(gpus: Sequence[str], config: RunConfig) -> DeviceSplit:
    """The trainer's ranks take the first GPUs, the engines the next.

    No split where they are meant to share (`engines.placement: colocated`), and where weights go
    over files and there are too few for both: the two then meet on the first ones. Raises UserError
    for what cannot work on these GPUs.
    """
    check_sharing(config)
    ranks, wanted = config.parallel.ranks, config.engines.count * config.engines.tensor
    if config.engines.placement == "disaggregated":
        if ranks + wanted <= len(gpus):
            return DeviceSplit(",".join(gpus[:ranks]), ",".join(gpus[ranks : ranks + wanted]))
        if config.weights.transport == "distributed":
            raise UserError(
                f"parallel.ranks {ranks} and engines.count x engines.tensor {wanted} need "
                f"{ranks + wanted} GPUs with weights.transport distributed, and there are "
                f"{len(gpus)}: set fewer, or engines.placement colocated with weights.transport "
                "tensor"
            )
    check_ranks(len(gpus), config)
    return DeviceSplit()


def check_ranks(gpus: int, config: RunConfig, source: str = "this machine has") -> None:
    """Each trainer rank of a node has one of its `gpus` of its own. Raises UserError.

    `source` ends with a verb: where that number comes from.
    """
    needed = config.parallel.ranks // config.parallel.nodes
    if needed > gpus:
        raise UserError(
            f"parallel.ranks {config.parallel.ranks} on parallel.nodes {config.parallel.nodes} "
            f"needs {needed} GPUs a node, one for each rank, and {source} {gpus}"
        )


def check_sharing(config: RunConfig) -> None:
    """Check that engines on GPUs can take weights by the configured transport. Raises UserError."""
    if config.engines.placement != "colocated" and config.weights.transport == "tensor":
        raise UserError(
            "weights.transport tensor hands weights over on a GPU that both use, and with "
            "engines.placement disaggregated engines have GPUs of their own: set "
            "weights.transport distributed, or engines.placement colocated"
        )


def check_trainer_here(config: RunConfig) -> None:
    """The trainer runs on CUDA wherever it is, whatever the engines do. Raises UserError."""
    if sees_gpu():
        check_ranks(len(visible_gpus()), config)


def split_of_this_machine(config: RunConfig) -> DeviceSplit:
    """Split the GPUs that this process may use; none with a Ray cluster that runs already.

    Such a cluster has GPUs of its own to hand out. Raises UserError.
    """
    check_ray(config)
    check_trainer_here(config)
    if resolve_device(config.engines) == "cpu":
        return DeviceSplit()
    if running_ray(config) is not None:
        check_sharing(config)
        return DeviceSplit()
    return split_devices(visible_gpus(), config)
