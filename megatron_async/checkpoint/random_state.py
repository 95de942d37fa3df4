"""Reads and writes the states of a rank's random generators of Python, NumPy, torch and Megatron.

Each rank has a separate file, which is useful only if the model is divided over ranks in the same
way as at the save.
"""

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from megatron.core import tensor_parallel
from safetensors import SafetensorError
from torch import Tensor

from megatron_async.checkpoint.manifest import CorruptCheckpoint, file_in, write_atomically

_NumpyState = tuple[str, npt.NDArray[np.uint32], int, int, float]
_TRACKER = "tracker/"


def random_state() -> dict[str, Tensor]:
    """Return a copy of the states of this process's random generators as named tensors."""
    _, internal, gauss = random.getstate()
    _, keys, position, has_gauss, cached = cast(_NumpyState, np.random.get_state(legacy=True))
    state = {
        "python": torch.tensor(internal, dtype=torch.int64),
        "python_gauss": torch.tensor(math.nan if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position, has_gauss], dtype=torch.int64),
        "numpy_gauss": torch.tensor(cached, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    for name, tracked in tensor_parallel.get_cuda_rng_tracker().get_states().items():
        state[_TRACKER + name] = tracked.clone()
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Tensor]) -> None:
    """Set this process's random generators to the states that `random_state` returned.

    Raises:
        KeyError: If a state is missing.
        ValueError: If a state is not valid on a machine of this kind.
    """
    gauss = float(state["python_gauss"])
    internal = tuple(state["python"].tolist())
    random.setstate((random.getstate()[0], internal, None if math.isnan(gauss) else gauss))
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = float(state["numpy_gauss"])
    np.random.set_state(("MT19937", np.array(keys, np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(
        {
            name.removeprefix(_TRACKER): tracked
            for name, tracked in state.items()
            if name.startswith(_TRACKER)
        }
    )
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def save_random_state(state: Mapping[str, Tensor], folder: Path, rank: int) -> None:
    """Write the random states of `rank` to its file in `folder`.

    Raises:
        OSError: If the file cannot be written.
    """
    write_atomically(folder / _file(rank), safetensors.torch.save(dict(state)))


def load_random_state(folder: Path, rank: int) -> None:
    """Set this process's random generators to the states in the file of `rank` in `folder`.

    Raises:
        CorruptCheckpoint: If the file cannot be read or its states cannot be restored.
    """
    name = _file(rank)
    try:
        restore_random_state(safetensors.torch.load_file(file_in(folder, name)))
    except (OSError, SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CorruptCheckpoint(f"{name} cannot be restored: {error}") from error


def _file(rank: int) -> str:
    """Return the name of the file with the random states of `rank`."""
    return f"random_{rank:05d}.safetensors"
