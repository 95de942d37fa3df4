"""Engines on the GPUs of a trainer's ranks (`engines.placement: colocated`): who shares which.

Invariants
- Rank r trains on the r-th GPU of the machine. Engine e generates on the next `engines.tensor` GPUs
  after those of the engines before it; its tensor rank j is on the j-th of them.
- So each tensor rank of an engine shares its GPU with one trainer rank, its giver: a handle of CUDA
  memory can be opened by processes that see that GPU, and an engine sees no others than its own.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """A trainer rank's place: the engine on its GPU, and which of that engine's tensor ranks."""

    engine: int
    tensor_rank: int

    @property
    def leads(self) -> bool:
        """Return whether this rank speaks with the engine."""
        return self.tensor_rank == 0


def seat_of(rank: int, count: int, tensor: int) -> Seat | None:
    """The seat of a trainer rank; None where no engine is on its GPU."""
    seat = Seat(*divmod(rank, tensor))
    return seat if seat.engine < count else None


def givers_of(engine: int, tensor: int) -> list[int]:
    """Trainer ranks whose GPUs the engine is on, in the order of its tensor ranks."""
    return list(range(engine * tensor, (engine + 1) * tensor))


def gpus_of(engine: int, tensor: int, visible: str | None) -> list[str]:
    """Names of an engine's GPUs; `visible`: the machine's, as CUDA_VISIBLE_DEVICES has them."""
    places = givers_of(engine, tensor)
    if not visible:
        return [str(place) for place in places]
    names = visible.split(",")
    return [names[place].strip() for place in places]
