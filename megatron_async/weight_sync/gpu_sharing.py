"""Maps engines to trainer ranks that use the same GPUs (`engines.placement: colocated`).

Invariants
- Rank r trains on the r-th GPU of the machine. Engine e generates on the next `engines.tensor` GPUs
  after those of the engines before it; its tensor rank j is on the j-th of them.
- So each tensor rank of an engine shares its GPU with one trainer rank, and that rank sends to it.
  The weights are passed as handles of CUDA memory. Only a process that sees the GPU can open such
  a handle, and an engine sees only its own GPUs.
"""


def engine_on(rank: int, count: int, tensor: int) -> int | None:
    """Return the index of the engine on the GPU of trainer rank `rank`; None if no engine is there.

    `count` is the number of engines, and `tensor` the number of GPUs of each.
    """
    engine = rank // tensor
    return engine if engine < count else None


def trainer_ranks_of(engine: int, tensor: int) -> list[int]:
    """Return the trainer ranks on the GPUs of engine number `engine`, in the order of the engine's
    tensor ranks.

    `tensor` is the number of GPUs of an engine.
    """
    return list(range(engine * tensor, (engine + 1) * tensor))


def gpus_of(engine: int, tensor: int, visible: str | None) -> list[str]:
    """Return the names of the GPUs of engine number `engine`.

    `tensor` is the number of GPUs of an engine. `visible` is the machine's CUDA_VISIBLE_DEVICES; if
    it is None or empty, the names are numbers.
    """
    places = trainer_ranks_of(engine, tensor)
    if not visible:
        return [str(place) for place in places]
    names = visible.split(",")
    return [names[place].strip() for place in places]
