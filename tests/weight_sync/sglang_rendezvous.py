"""Prints whether SGLang's own group builder meets under the keys that our sender uses.

    python -m tests.weight_sync.sglang_rendezvous DEVICE

A backend of our own stands for NCCL or gloo: torch hands it the store in which the ranks meet.
"""

from __future__ import annotations

import json
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


def main(device: str) -> None:
    install_stand_ins()
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
    seen = {
        name: rendezvous_store(base, NAME, name).check(["from_engine"]) for name in ("cpu", "cuda")
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
