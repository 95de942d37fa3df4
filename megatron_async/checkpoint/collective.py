"""Provides the collective operations by which the ranks agree about a checkpoint."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_async.checkpoint.manifest import Checkpoint, CorruptCheckpoint, faults


def first_error(mine: str | None, group: dist.ProcessGroup | None = None) -> str | None:
    """Return, on every rank, the error of the lowest rank that has an error; None if no rank has
    one.

    Collective: every rank of `group` calls it.

    Args:
        mine: The error of this rank; None if it has none.
    """
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, mine, group=group)
    return next((error for error in errors if error is not None), None)


@contextmanager
def corrupt_on_all(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Make every rank raise CorruptCheckpoint if one rank raises it inside the block.

    All ranks then raise the error of the lowest such rank. Collective: every rank of `group` enters
    and leaves the block.
    """
    problem = None
    try:
        yield
    except CorruptCheckpoint as error:
        problem = str(error)
    if (found := first_error(problem, group)) is not None:
        raise CorruptCheckpoint(found)


def shared_faults(checkpoint: Checkpoint, group: dist.ProcessGroup | None = None) -> list[str]:
    """Check the files of a checkpoint, with each rank reading some of them; return the faults of
    all files on every rank.

    The result has one message for each fault. If torch.distributed is initialized, every rank of
    `group` must make this call; otherwise this process reads all files.
    """
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    files = checkpoint.manifest.files
    mine = faults(checkpoint.path, {name: files[name] for name in sorted(files)[rank::size]})
    if size == 1:
        return mine
    found: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(found, mine, group=group)
    return [problem for of_rank in found for problem in of_rank]
