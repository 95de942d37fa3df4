"""Engines on the GPUs of a trainer's ranks (`engines.placement: colocated`): who shares which.

Invariants
- Rank r trains on the r-th GPU of the machine. Engine e generates on the next `engines.tensor` GPUs
  after those of the engines before it; its tensor rank j is on the j-th of them.
- So each tensor rank of an engine shares its GPU with one trainer rank, which sends to it: a handle
  of CUDA memory can be opened by processes that see that GPU, and an engine sees its own only.
"""


def engine_on(rank: int, count: int, tensor: int) -> int | None:
    """Return the engine on a trainer rank's GPU; None where no engine is."""
    engine = rank // tensor
    return engine if engine < count else None


def trainer_ranks_of(engine: int, tensor: int) -> list[int]:
    """Trainer ranks whose GPUs the engine is on, in the order of its tensor ranks."""
    return list(range(engine * tensor, (engine + 1) * tensor))


def gpus_of(engine: int, tensor: int, visible: str | None) -> list[str]:
    """Names of an engine's GPUs; `visible`: the machine's, as CUDA_VISIBLE_DEVICES has them."""
    places = trainer_ranks_of(engine, tensor)
    if not visible:
        return [str(place) for place in places]
    names = visible.split(",")
    return [names[place].strip() for place in places]
