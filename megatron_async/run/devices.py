"""Which GPUs of one machine train and which generate.

Ray hands out the GPUs that it was started with, and torchrun's ranks count from the first that they
see: without a split both would begin with the same one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from megatron_async.config import RunConfig
from megatron_async.errors import UserError
from megatron_async.rollout.sglang_process import resolve_device

VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class DeviceSplit:
    """Values of CUDA_VISIBLE_DEVICES; both None where there is nothing to divide."""

    trainers: str | None = None
    engines: str | None = None


def split_devices(gpus: Sequence[str], config: RunConfig) -> DeviceSplit:
    """The trainer's ranks take the first GPUs, the engines the next.

    No split where they are meant to share (`engines.placement: colocated`), and where weights go
    over files and there are too few for both: the two then meet on the first ones. Raises UserError
    for a transport that cannot work on these GPUs.
    """
    ranks, wanted = config.parallel.ranks, config.engines.count * config.engines.tensor
    transport = config.weights.transport
    if config.engines.placement == "colocated":
        if wanted > 1:
            raise UserError(
                "engines.placement colocated works with one engine on one GPU, which the weights "
                f"are handed over on; engines.count x engines.tensor is {wanted}"
            )
        return DeviceSplit()
    if transport == "tensor":
        raise UserError(
            "weights.transport tensor hands weights over on one GPU, and with engines.placement "
            "disaggregated engines have GPUs of their own: set weights.transport distributed, or "
            "engines.placement colocated"
        )
    if ranks + wanted <= len(gpus):
        return DeviceSplit(",".join(gpus[:ranks]), ",".join(gpus[ranks : ranks + wanted]))
    if transport == "distributed":
        raise UserError(
            f"parallel.ranks {ranks} and engines.count x engines.tensor {wanted} need "
            f"{ranks + wanted} GPUs with weights.transport distributed, and there are {len(gpus)}: "
            "set fewer, or engines.placement colocated with weights.transport tensor"
        )
    return DeviceSplit()


def split_of_this_machine(config: RunConfig) -> DeviceSplit:
    """Of the GPUs that this process may use. Raises UserError."""
    if config.engines.kind == "simulated" or resolve_device(config.engines) == "cpu":
        return DeviceSplit()
    return split_devices(visible_gpus(), config)


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get(VISIBLE_VARIABLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
