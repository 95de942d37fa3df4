"""The engine's end of `weights.transport: distributed`: receive one bucket, load another meanwhile.

SGLang receives a bucket, loads it, and only then listens for the next; the link is idle meanwhile.
Here each announcement also has the size of the bucket after it (in `load_format`, the one field
that SGLang hands through), so that its receive is posted before this one's load begins.

Invariants
- Receives of a group are posted in the order in which its sender broadcasts, one ahead at most.
- Two buffers for each group, from its first bucket until its last: what was handed out is valid
  until the next bucket is asked for, as the one after that arrives in its place. Loaders copy; none
  may keep it.
- Between updates a device's memory is free for other things. A host's two newest buffers are kept:
  there, the first touch of new memory takes as long as receiving into it.
- After a failure the group is forgotten. Its sender throws it away as well, so that a receive that
  is still posted never meets another update's bytes. Of a sender that was killed everything is
  forgotten when the next update begins (`clear`), and its group is to be ended then.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLATTENED = "flattened_bucket"
_SEPARATOR = "+next_bytes="


def load_format(next_bytes: int) -> str:
    """Return the announcement of a bucket that one of `next_bytes` follows; 0: it is the last."""
    return f"{FLATTENED}{_SEPARATOR}{next_bytes}"


def next_bytes_of(announced: str | None) -> int | None:
    """The inverse of `load_format`; None for an announcement without a next size."""
    base, separator, size = (announced or "").partition(_SEPARATOR)
    return int(size) if base == FLATTENED and separator else None


@dataclass(frozen=True, eq=False)
class _Arrival:
    """A posted receive into the beginning of `buffer`; `other` is being loaded from."""

    buffer: Tensor
    size: int
    work: Any
    other: Tensor


class BucketPrefetcher:
    """Receives of all groups of one process. Not thread-safe."""

    def __init__(self) -> None:
        self._arriving: dict[str, _Arrival] = {}
        self._spare: list[Tensor] = []

    def take(
        self, group: str, size: int, next_bytes: int, start: Callable[[Tensor], Any], device: str
    ) -> Tensor:
        """The next bucket of `group`, [size] bytes, on `device`; then listens for one more.

        `start` posts a broadcast's receive into a byte tensor and returns its work handle. Raises
        ValueError when the bucket is not as large as was announced, and what the handle raises.
        """
        arrival = self._arriving.pop(group, None)
        if arrival is None:
            spare, self._spare = self._spare, []
            buffer = _room(spare, size, device)
            other = spare[-1] if spare else buffer[:0]
            arrival = _Arrival(buffer, size, start(buffer[:size]), other)
        if arrival.size != size:
            raise ValueError(
                f"a bucket of {arrival.size} bytes was announced for {group}, and {size} came"
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
        """The group is being left; whether a receive of it is still posted."""
        return self._arriving.pop(group, None) is not None

    def clear(self) -> frozenset[str]:
        """An update begins: what is still posted belongs to one that nobody ended; its groups."""
        groups = frozenset(self._arriving)
        self._arriving.clear()
        return groups


def _room(free: list[Tensor], size: int, device: str) -> Tensor:
    """Take a buffer out of `free`, or make one, that holds `size` bytes."""
    for place, buffer in enumerate(free):
        if buffer.nbytes >= size:
            return free.pop(place)
    return torch.empty(size, dtype=torch.uint8, device=device)
