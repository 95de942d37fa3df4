"""Collective operations by which the ranks agree about a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_async.checkpoint.manifest import Checkpoint, CorruptCheckpoint, faults


def first_error(mine: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Collective. The error of the lowest rank that has one."""
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine, group=group)
    return next((error for error in errors if error is not None), None)


@contextmanager
def corrupt_on_all(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Collective. A CorruptCheckpoint inside the block on one rank is raised by every rank."""
    problem = None
    try:
        yield
    except CorruptCheckpoint as error:
        problem = str(error)
    if (found := first_error(problem, group)) is not None:
        raise CorruptCheckpoint(found)


def shared_faults(checkpoint: Checkpoint, group: dist.ProcessGroup | None = None) -> list[str]:
    """`faults`, divided over the ranks; the same on all. Collective where there are ranks."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    files = checkpoint.manifest.files
    mine = faults(checkpoint.path, {name: files[name] for name in sorted(files)[rank::size]})
    if size == 1:
        return mine
    found: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(found, mine, group=group)
    return [problem for part in found for problem in part]
