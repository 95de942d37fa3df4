"""Maps engines to trainer ranks on the same GPUs (`engines.placement: colocated`).

Invariants
- Rank r trains on the r-th GPU of the machine. Engine e uses the GPUs e * t to e * t + t - 1, where
  t is `engines.tensor`; its tensor-parallel rank j is on GPU e * t + j.
- So each tensor-parallel rank of an engine shares its GPU with one trainer rank, and gets the
  weights from the memory of that rank. They are passed as handles of CUDA memory. Only a process
  that sees the GPU can open such a handle, and an engine sees only its own GPUs.
"""


def engine_on(rank: int, count: int, tensor: int) -> int | None:
    """Return the index of the engine on the GPU of trainer rank `rank`; None if no engine uses this
    GPU.

    `count` is the number of engines, and `tensor` is the number of GPUs of each engine.
    """
    engine = rank // tensor
    return engine if engine < count else None


def trainer_ranks_of(engine: int, tensor: int) -> list[int]:
    """Return the trainer ranks on the GPUs of engine number `engine`, in the order of the engine's
    tensor-parallel ranks.

    `tensor` is the number of GPUs of an engine.
    """
    return list(range(engine * tensor, (engine + 1) * tensor))


def gpus_of(engine: int, tensor: int, visible: str | None) -> list[str]:
    """Return the names of the GPUs of engine number `engine`.

    The names are entries of `visible`, the value of CUDA_VISIBLE_DEVICES on this machine; if it is
    None or empty, they are the numbers of the GPUs. `tensor` is the number of GPUs of an engine.
    """
    places = trainer_ranks_of(engine, tensor)
    if not visible:
        return [str(place) for place in places]
    names = visible.split(",")
    return [names[place].strip() for place in places]
