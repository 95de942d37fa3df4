"""Prints where SGLang's own weight updater connects, and the NCCL variables that it does so with.

    python -m tests.weight_sync.sglang_rendezvous

A line for each device, from a fork: the imports, ten seconds, are made once. A backend that this
module registers stands for NCCL or gloo: torch hands it the store in which the ranks connect.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_async.engines.sglang.cpu import install_stand_ins
from megatron_async.engines.sglang.weight_updater import join
from megatron_async.weight_sync.nccl_errors import WEIGHT_GROUP_VARIABLES
from megatron_async.weight_sync.transports.distributed import rendezvous_store

NAME = "megatron-async-0123"


class Met(Exception):
    """The group builder has handed its store over."""


def meet(device: str) -> dict[str, Any]:
    """Join a weight group for `device` as an engine does.

    Returns:
        For each kind of device, whether the group's store has something under the keys that the
        sender would use; and `variables`, those of `WEIGHT_GROUP_VARIABLES` that were set while
        the group was constructed.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    variables: dict[str, str | None] = {}

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        store.set("from_engine", "here")
        variables.update({name: os.environ.get(name) for name in WEIGHT_GROUP_VARIABLES})
        raise Met

    dist.Backend.register_backend("recording", create, devices=[device])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    base = dist.HashStore()
    found = mock.patch(
        "torch.distributed.distributed_c10d.rendezvous", lambda *_a, **_k: iter([(base, 1, 3)])
    )
    engine = SimpleNamespace(tp_rank=0, _model_update_group={})
    joining = WeightUpdater.init_weights_update_group
    with found:
        # It reports the exception that ends it here.
        join(joining, engine, "engine", 1, 1, 3, NAME, backend="recording")
    under = {
        name: rendezvous_store(base, NAME, name).check(["from_engine"]) for name in ("cpu", "cuda")
    }
    return {**under, "variables": variables}


def main() -> None:
    install_stand_ins()
    importlib.import_module("sglang.srt.model_executor.model_runner_components.weight_updater")
    for device in ("cpu", "cuda"):
        child = os.fork()
        if child == 0:
            print(json.dumps({device: meet(device)}), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"it failed on {device}, and this is after its traceback")


if __name__ == "__main__":
    main()
