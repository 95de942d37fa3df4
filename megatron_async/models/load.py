"""A Hugging Face safetensors directory into this rank's Megatron shards, slice by slice.

Invariants
- A rank reads only the slices it holds; nothing larger than one shard is in memory beside the
  model itself.
- All or nothing is checked first (`model_files.check_tensors`).
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture
from megatron_async.models.model_files import SafetensorsDirectory, check_tensors
from megatron_async.models.parameters import placed_parameters, unwrap
from megatron_async.models.shards import split


@torch.no_grad()
def load_hf_weights(chunks: Sequence[torch.nn.Module], model_dir: Path | str) -> None:
    """Fill this rank's parameters from a Hugging Face directory, in the parameters' precision.

    Raises UserError for a missing, damaged or unfitting checkpoint.
    """
    architecture: Architecture = unwrap(chunks[0]).architecture
    with SafetensorsDirectory(model_dir) as directory:
        check_tensors(directory, architecture)
        for placed in placed_parameters(chunks, architecture):
            shard = split(
                placed.rule, placed.tensor_names, directory.read, placed.size, placed.rank
            )
            if not bool(torch.isfinite(shard).all()):
                raise UserError(
                    f"model.path {model_dir}: tensor {placed.tensor_names[0]} holds NaN or "
                    "infinity; download the model again, or take another checkpoint of it"
                )
            placed.parameter.copy_(shard)
