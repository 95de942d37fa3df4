"""A trainer that publishes one version to the engine at URL: `stopped_sender URL SECONDS`."""

from __future__ import annotations

import sys

import torch

from megatron_async.config.rollout import EngineConfig, WeightsConfig
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.transports.distributed import DistributedSender

if __name__ == "__main__":
    settings = WeightsConfig(timeout_seconds=float(sys.argv[2]))
    sender = DistributedSender(settings, EngineConfig(), torch.device("cpu"))
    sender.connect([EngineAddress("engine", sys.argv[1])])
    buckets = [[("x.weight", torch.ones(256, 64))], [("y.weight", torch.ones(128))]]
    sender.send(buckets, PolicyVersion(0, 1))
    sender.close()
