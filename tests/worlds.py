"""Provides process groups ("worlds") of several sizes, one after the other, in ranks that are
started once.

    def body(cases):                                # in every rank: run_ranks(body, 4, cases)
        for number, case in enumerate(cases):
            with world(case.parallel.ranks, number) as member:
                if member:
                    with trainer_session(...): ...

Starting a rank costs more than most cases. `legal_layouts` lists the possible layouts of a model.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from unittest import mock

import torch.distributed as dist

from megatron_async.config.model import ParallelConfig
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture
from megatron_async.models.layout import check_layout
from megatron_async.trainer.parallel import destroy_parallel

# A rank that is not in a world proceeds, and may wait long for the members of its next world.
_TIMEOUT = timedelta(seconds=300)


@contextmanager
def world(size: int, number: int) -> Iterator[bool]:
    """Create a process group of the first `size` ranks; yield whether this rank is in it. `number`
    must be unique."""
    rank = int(os.environ["RANK"])
    if rank >= size:
        yield False
        return
    server = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    store = dist.PrefixStore(f"world-{number}", server)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        with mock.patch.dict(os.environ, {"WORLD_SIZE": str(size)}):
            yield True
    finally:
        destroy_parallel()
        gc.collect()  # Models in cycles hold groups, whose threads wake a hundred times a second.


def legal_layouts(architecture: Architecture, largest: int) -> list[ParallelConfig]:
    """Return every layout of at most `largest` ranks that `check_layout` accepts."""
    sizes = range(1, largest + 1)
    found = []
    for ranks, tensor, pipeline, expert, sequence in product(
        sizes, sizes, sizes, sizes, (False, True)
    ):
        if ranks % (tensor * pipeline) or (sequence and tensor == 1):
            continue
        parallel = ParallelConfig(
            ranks=ranks, tensor=tensor, pipeline=pipeline, expert=expert, sequence=sequence
        )
        try:
            check_layout(architecture, parallel)
        except UserError:
            continue
        found.append(parallel)
    return found
