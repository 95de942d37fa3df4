"""Prints in which store SGLang's own weight updater joins a weight group, and which NCCL variables
are set then.

    python -m tests.weight_sync.sglang_rendezvous

Prints one line per kind of device. Each line is printed by a forked process, so that SGLang's
imports, which take ten seconds, are done only once. This module registers a fake backend for torch
in place of NCCL or gloo; torch passes it the store in which the ranks rendezvous.
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


class StoreReceived(Exception):
    """Raised by the fake backend once it has received the group's store."""


def join_group(device: str) -> dict[str, Any]:
    """Join a weight group for `device` as an engine does.

    Returns:
        For each kind of device, whether the engine wrote to the store under the keys that the
        sender would use for that kind; and `variables`, the values of the variables in
        `WEIGHT_GROUP_VARIABLES` while the group was constructed.
    """
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

    variables: dict[str, str | None] = {}

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        store.set("from_engine", "here")
        variables.update({name: os.environ.get(name) for name in WEIGHT_GROUP_VARIABLES})
        raise StoreReceived

    dist.Backend.register_backend("recording", create, devices=[device])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    base = dist.HashStore()
    rendezvous = mock.patch(
        "torch.distributed.distributed_c10d.rendezvous", lambda *_a, **_k: iter([(base, 1, 3)])
    )
    engine = SimpleNamespace(tp_rank=0, _model_update_group={})
    joining = WeightUpdater.init_weights_update_group
    with rendezvous:
        # SGLang reports `StoreReceived`, which ends the call here, and does not raise it.
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
            print(json.dumps({device: join_group(device)}), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"joining failed on {device}; the traceback is above")


if __name__ == "__main__":
    main()
