"""Divides one machine's GPUs between trainer and engines, and decides whether the run uses Ray.

Engines get the GPUs with which the process backend was opened, and trainer rank i uses GPU i of
those that it sees. If both saw all GPUs, both would use the first one.

The functions of this module start no process and write no file, so commands call them before they
create a run directory.
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

# Ray's environment variable with the address of a running cluster.
RUNNING_RAY_VARIABLE: Final = "RAY_ADDRESS"


def uses_ray(config: RunConfig) -> bool:
    """Return whether a run on one machine uses Ray: setting `cluster` is ray, or it is auto and the
    environment has RAY_ADDRESS."""
    running = bool(os.environ.get(RUNNING_RAY_VARIABLE))
    return config.cluster == "ray" or (config.cluster == "auto" and running)


def check_ray(config: RunConfig, nodes: int = 1) -> None:
    """Raise UserError if the run needs Ray (several nodes, or `cluster`) and Ray is not
    installed."""
    if (nodes > 1 or uses_ray(config)) and importlib.util.find_spec("ray") is None:
        reason = f"{nodes} nodes are used" if nodes > 1 else f"cluster is {config.cluster}"
        raise UserError(
            f"{reason}, which requires Ray, and Ray is not installed: pip install "
            '"megatron_async[cluster]", or set cluster local on one machine'
        )


def running_ray(config: RunConfig) -> str | None:
    """Return the address of the running Ray cluster that a one-machine run uses; None if it uses
    none."""
    return os.environ.get(RUNNING_RAY_VARIABLE) or None if uses_ray(config) else None


@dataclass(frozen=True)
class DeviceSplit:
    """Values of CUDA_VISIBLE_DEVICES for the trainer ranks and for the engines. Both are None if
    the GPUs are not divided."""

    trainers: str | None = None
    engines: str | None = None


def split_devices(gpus: Sequence[str], config: RunConfig) -> DeviceSplit:
    """Assign the first of `gpus` to the trainer's ranks and the following ones to the engines.

    The GPUs are not divided in two cases. With `engines.placement: colocated`, trainer and engines
    are meant to share them. If there are fewer GPUs than ranks and engines need, and weights are
    sent through files, ranks and engines also share the first GPUs.

    Raises:
        UserError: There are too few GPUs for the ranks, or for ranks and engines with
            `weights.transport: distributed`; or the transport is `tensor`, which needs shared GPUs,
            and the engines have separate ones.
    """
    check_sharing(config)
    ranks, for_engines = config.parallel.ranks, config.engines.count * config.engines.tensor
    if config.engines.placement == "disaggregated":
        if ranks + for_engines <= len(gpus):
            return DeviceSplit(",".join(gpus[:ranks]), ",".join(gpus[ranks : ranks + for_engines]))
        if config.weights.transport == "distributed":
            raise UserError(
                f"parallel.ranks {ranks} and engines.count x engines.tensor {for_engines} need "
                f"{ranks + for_engines} GPUs with weights.transport distributed; this machine has "
                f"{len(gpus)}. Lower them, or set engines.placement colocated with "
                "weights.transport tensor."
            )
    check_ranks(len(gpus), config)
    return DeviceSplit()


def check_ranks(gpus: int, config: RunConfig, source: str = "this machine has") -> None:
    """Raise UserError unless a node has a separate GPU for each of its trainer ranks.

    Args:
        gpus: GPUs of the node.
        config: The run's settings.
        source: Subject and verb that the message puts before the number of GPUs.
    """
    needed = config.parallel.ranks // config.parallel.nodes
    if needed > gpus:
        raise UserError(
            f"parallel.ranks {config.parallel.ranks} on parallel.nodes {config.parallel.nodes} "
            f"needs {needed} GPUs per node, one for each rank; {source} {gpus}"
        )


def check_sharing(config: RunConfig) -> None:
    """Raise UserError if the weight transport needs shared GPUs, but the engines have separate
    ones."""
    if config.engines.placement != "colocated" and config.weights.transport == "tensor":
        raise UserError(
            "weights.transport is tensor, which requires trainer and engines on the same GPU, but "
            "engines.placement is disaggregated, which gives engines separate GPUs. Set "
            "weights.transport distributed, or engines.placement colocated."
        )


def check_trainer_here(config: RunConfig) -> None:
    """Raise UserError if this machine has GPUs, but not one for each of its trainer ranks. If a
    machine has GPUs, its ranks use them."""
    if sees_gpu():
        check_ranks(len(visible_gpus()), config)


def split_of_this_machine(config: RunConfig) -> DeviceSplit:
    """Divide the GPUs that this process may use between trainer and engines.

    Nothing is divided (the split is empty) if engines run on the CPU, or in a running Ray cluster,
    which assigns its own GPUs.

    Raises:
        UserError: There are too few GPUs for these settings, the weight transport needs shared GPUs
            and the engines have separate ones, or Ray is needed and not installed.
    """
    check_ray(config)
    check_trainer_here(config)
    if resolve_device(config.engines) == "cpu":
        return DeviceSplit()
    if running_ray(config) is not None:
        check_sharing(config)
        return DeviceSplit()
    return split_devices(visible_gpus(), config)
