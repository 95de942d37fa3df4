"""Receives the next bucket of weights while an engine loads the current one.

This module runs in the engine, with `weights.transport: distributed`. A bucket is a set of tensors
that are sent together. SGLang receives a bucket, loads it, and only then receives the next one, so
the network is idle while it loads. Here the announcement of a bucket also contains the size of the
bucket after it, in the field `load_format`, the only field that SGLang passes on unchanged. So the
receive of the next bucket can be posted (started, without waiting for its data) before the current
bucket is loaded.

Invariants
- The receives of a group are posted in the order in which its sender broadcasts, and at most one
  bucket ahead.
- From the first to the last bucket of an update, a group uses two buffers alternately. A returned
  bucket is valid until the next bucket is requested, because its buffer then receives the bucket
  after the next. So loaders must copy the values.
- After an update, buffers on a GPU are released, so that their memory is free for generation. The
  two newest buffers on the host are kept, because the first use of new host memory takes as long as
  receiving a bucket into it.
- After a failed update, engine and sender both give up the group, so that a posted receive cannot
  get the bytes of another update. If the sender was killed, the posted receives of its groups are
  forgotten when the next update begins (`clear`), and the caller must then end these groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLATTENED = "flattened_bucket"
_SEPARATOR = "+next_bytes="


def load_format(next_bytes: int) -> str:
    """Return the field `load_format` of the announcement of a bucket; it contains `next_bytes`, the
    size of the bucket after it.

    `next_bytes` is 0 if no bucket follows.
    """
    return f"{FLATTENED}{_SEPARATOR}{next_bytes}"


def next_bytes_of(announced: str | None) -> int | None:
    """Return the size of the following bucket in bytes, which the field `load_format` of an
    announcement contains; None if it contains none."""
    base, separator, size = (announced or "").partition(_SEPARATOR)
    return int(size) if base == FLATTENED and separator else None


@dataclass(frozen=True, eq=False)
class _Arrival:
    """A posted receive (started, without waiting for its data) of `size` bytes into the start of
    `buffer`. `work` is its handle, and `other` is the group's other buffer."""

    buffer: Tensor
    size: int
    work: Any
    other: Tensor


class BucketPrefetcher:
    """The posted receives (started, without waiting for their data) of all groups of one engine
    process, at most one for each group. Not thread-safe."""

    def __init__(self) -> None:
        self._arriving: dict[str, _Arrival] = {}
        self._spare: list[Tensor] = []

    def take(
        self, group: str, size: int, next_bytes: int, start: Callable[[Tensor], Any], device: str
    ) -> Tensor:
        """Wait for the next bucket of `group`, start to receive the bucket after it, and return the
        bucket.

        Args:
            group: Name of the group.
            size: Number of bytes of the bucket.
            next_bytes: Number of bytes of the bucket after it; 0 if there is none.
            start: Function that starts to receive a broadcast into a byte tensor and returns its
                work handle.
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
        """Forget the posted receive of a group that the engine is about to leave; return whether
        there was one."""
        return self._arriving.pop(group, None) is not None

    def clear(self) -> frozenset[str]:
        """Forget all posted receives, which an unfinished update has left; return the names of
        their groups."""
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
