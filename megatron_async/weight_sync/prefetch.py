"""Receives the next bucket while an engine loads the current one (`weights.transport:
distributed`).

This module runs in the engine. SGLang receives a bucket, loads it, and only then waits for the next
one, so the link is idle while it loads. Here each announcement of a bucket also contains the size
of the bucket after it, in `load_format`, the only field that SGLang passes on. So the next receive
is posted before the current bucket is loaded.

Invariants
- The receives of a group are posted in the order in which its sender broadcasts, at most one ahead.
- A group has two buffers from its first bucket to its last. A returned bucket is valid until the
  next one is requested, because the bucket after that arrives in the same buffer. Loaders copy the
  values and must not keep the buffer.
- Between updates a device's memory is free for other uses. The two newest buffers on the host are
  kept, because the first use of new host memory takes as long as receiving a bucket into it.
- After a failure the group is forgotten. Its sender abandons it too, so that a posted receive
  cannot get the bytes of another update. If a sender was killed, all its receives are forgotten
  when the next update begins (`clear`), and its groups must be ended then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLATTENED = "flattened_bucket"
_SEPARATOR = "+next_bytes="


def load_format(next_bytes: int) -> str:
    """Return the `load_format` that announces a bucket followed by one of `next_bytes` bytes.

    0 means that it is the last bucket.
    """
    return f"{FLATTENED}{_SEPARATOR}{next_bytes}"


def next_bytes_of(announced: str | None) -> int | None:
    """Return the size of the following bucket from an announcement; None if it does not contain
    one."""
    base, separator, size = (announced or "").partition(_SEPARATOR)
    return int(size) if base == FLATTENED and separator else None


@dataclass(frozen=True, eq=False)
class _Arrival:
    """A posted receive of `size` bytes into the start of `buffer`; `other` is the group's other
    buffer."""

    buffer: Tensor
    size: int
    work: Any
    other: Tensor


class BucketPrefetcher:
    """The posted receives of all groups of one process. Not thread-safe."""

    def __init__(self) -> None:
        self._arriving: dict[str, _Arrival] = {}
        self._spare: list[Tensor] = []

    def take(
        self, group: str, size: int, next_bytes: int, start: Callable[[Tensor], Any], device: str
    ) -> Tensor:
        """Return the next bucket of `group` and post the receive of the one after it.

        Args:
            group: Name of the group.
            size: Number of bytes of the bucket.
            next_bytes: Number of bytes of the bucket after it; 0 if there is none.
            start: Posts the receive of a broadcast into a byte tensor; returns its work handle.
            device: Device of the buffers.

        Returns:
            The bucket, [size] bytes.

        Raises:
            ValueError: If the bucket has another size than was announced.
        """
        arrival = self._arriving.pop(group, None)
        if arrival is None:
            spare, self._spare = self._spare, []
            buffer = _room(spare, size, device)
            other = spare[-1] if spare else buffer[:0]
            arrival = _Arrival(buffer, size, start(buffer[:size]), other)
        if arrival.size != size:
            raise ValueError(
                f"a bucket of {arrival.size} bytes was announced for {group}, but it has {size} "
                "bytes"
            )
        arrival.work.wait()
        if next_bytes:
            free = _room([arrival.other], next_bytes, device)
            work = start(free[:next_bytes])
            self._arriving[group] = _Arrival(free, next_bytes, work, arrival.buffer)
        elif device == "cpu":
            self._spare = [arrival.buffer, arrival.other]
        return arrival.buffer[:size]

    def forget(self, group: str) -> bool:
        """Forget the posted receive of a group that is being left; return whether there was one."""
        return self._arriving.pop(group, None) is not None

    def clear(self) -> frozenset[str]:
        """Forget receives left by an unfinished update; return their groups."""
        groups = frozenset(self._arriving)
        self._arriving.clear()
        return groups


def _room(free: list[Tensor], size: int, device: str) -> Tensor:
    """Remove a buffer of at least `size` bytes from `free` and return it; allocate one if there is
    none."""
    for place, buffer in enumerate(free):
        if buffer.nbytes >= size:
            return free.pop(place)
    return torch.empty(size, dtype=torch.uint8, device=device)
