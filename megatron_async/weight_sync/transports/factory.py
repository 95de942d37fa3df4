"""Choice of the transport of a run: the only module that imports them all."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.weight_sync.transports.base import WeightSender
from megatron_async.weight_sync.transports.delta import DeltaSender
from megatron_async.weight_sync.transports.disk import DiskSender
from megatron_async.weight_sync.transports.distributed import DistributedSender
from megatron_async.weight_sync.transports.tensor import TensorSender


def make_sender(
    settings: WeightsConfig,
    engines: EngineConfig,
    device: torch.device,
    directory: Path,
) -> WeightSender:
    """The sender that `weights.transport` names.

    `device` is the engines' kind of device; `directory` is where `disk` and `delta` publish (a
    file system that the engines' hosts see under the same name).
    """
    match settings.transport:
        case "distributed":
            return DistributedSender(settings, engines, device)
        case "tensor":
            return TensorSender(settings, engines, device)
        case "disk":
            return DiskSender(settings, engines, directory)
        case "delta":
            return DeltaSender(settings, engines, directory)
