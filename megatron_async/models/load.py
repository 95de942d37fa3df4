"""Loads a Hugging Face safetensors directory into this rank's Megatron shards, slice by slice.

Invariants
- A rank reads only the slices that its shards need. In addition to the model, at most one shard is
  in memory.
- All tensors are checked before the first is loaded (`model_files.check_tensors`).
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture
from megatron_async.models.model_files import SafetensorsDirectory, check_tensors
from megatron_async.models.parameters import local_parameters, unwrap
from megatron_async.models.shards import split


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], model_dir: Path | str) -> None:
    """Fill this rank's parameters with the values of a Hugging Face directory, cast to the
    parameters' precision.

    Args:
        chunks: The parts of the model that this rank has.
        model_dir: The Hugging Face directory.

    Raises:
        UserError: If the weights are missing or damaged, do not fit the model, or are not finite.
    """
    architecture: Architecture = unwrap(chunks[0]).architecture
    with SafetensorsDirectory(model_dir) as directory:
        check_tensors(directory, architecture)
        for placed in local_parameters(chunks, architecture):
            shard = split(
                placed.rule, placed.tensor_names, directory.read, placed.size, placed.rank
            )
            if not bool(torch.isfinite(shard).all()):
                raise UserError(
                    f"model.path {model_dir}: tensor {placed.tensor_names[0]} contains NaN or "
                    "infinity. Download the model again, or use another checkpoint of it"
                )
            placed.parameter.copy_(shard)
