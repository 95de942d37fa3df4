"""Prints whether SGLang's own group builder meets under the keys that our sender uses.

    python -m tests.weight_sync.sglang_rendezvous

A line for each device, from a fork: the imports, ten seconds, are made once. A backend of our own
stands for NCCL or gloo: torch hands it the store in which the ranks meet.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron_async.engines.sglang.cpu import install_stand_ins
from megatron_async.weight_sync.transports.distributed import rendezvous_store

NAME = "megatron-async-0123"


class Met(Exception):
    """The group builder has handed its store over."""


def meet(device: str) -> dict[str, bool]:
    """Whether something stands under each device's keys once SGLang has met there by `device`."""
    from sglang.srt.utils.common import init_custom_process_group

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        store.set("from_engine", "here")
        raise Met

    dist.Backend.register_backend("recording", create, devices=[device])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    base = dist.HashStore()
    found = mock.patch(
        "torch.distributed.distributed_c10d.rendezvous", lambda *_a, **_k: iter([(base, 1, 3)])
    )
    with found, suppress(Met):
        init_custom_process_group(
            backend="recording", init_method="tcp://engine:1", world_size=3, rank=1, group_name=NAME
        )
    return {
        name: rendezvous_store(base, NAME, name).check(["from_engine"]) for name in ("cpu", "cuda")
    }


def main() -> None:
    install_stand_ins()
    importlib.import_module("sglang.srt.utils.common")
    for device in ("cpu", "cuda"):
        child = os.fork()
        if child == 0:
            print(json.dumps({device: meet(device)}), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"it failed on {device}, and this is after its traceback")


if __name__ == "__main__":
    main()
