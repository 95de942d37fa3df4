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
from megatron_async.rollout.sglang_process import resolve_device

VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class DeviceSplit:
    """Values of CUDA_VISIBLE_DEVICES; both None where there is nothing to divide."""

    trainers: str | None = None
    engines: str | None = None


def split_devices(gpus: Sequence[str], config: RunConfig) -> DeviceSplit:
    """The trainer's ranks take the first GPUs, the engines the next.

    No split where they are meant to share (`engines.placement: colocated`), and where there are too
    few for both: the two then meet on the first ones, as on a machine with a single GPU.
    """
    ranks, wanted = config.parallel.ranks, config.engines.count * config.engines.tensor
    if config.engines.placement == "colocated" or ranks + wanted > len(gpus):
        return DeviceSplit()
    return DeviceSplit(",".join(gpus[:ranks]), ",".join(gpus[ranks : ranks + wanted]))


def split_of_this_machine(config: RunConfig) -> DeviceSplit:
    """Of the GPUs that this process may use."""
    if resolve_device(config.engines) == "cpu":
        return DeviceSplit()
    return split_devices(visible_gpus(), config)


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get(VISIBLE_VARIABLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]
