"""The weights alone of a checkpoint into a model: a new run's starting point.

Invariants
- Collective. Every file is verified first (ranks share the reading), so nothing is half loaded, and
  every tensor against its checksum as it is read.
- The checkpoint may be of any layout and precision; the parameters keep theirs.
- Beside the model, a rank holds one of its parameters in the checkpoint's precision.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_async.checkpoint.checksum import TensorTally, dtype_named
from megatron_async.checkpoint.collective import first_error, shared_faults
from megatron_async.checkpoint.files import PieceReader
from megatron_async.checkpoint.manifest import (
    WEIGHTS,
    Checkpoint,
    CorruptCheckpoint,
    TensorRecord,
    read_checkpoint,
)
from megatron_async.checkpoint.placement import boxes
from megatron_async.checkpoint.state import (
    ParameterShard,
    count,
    load_shard,
    original,
    replicas,
    slot_of,
    verify,
)
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture
from megatron_async.models.parameters import PlacedParameter, placed_parameters


def load_checkpoint_weights(model: Any, path: Path) -> None:
    """Fill `model` (a rank's chunk, unwrapped). Raises UserError for a damaged or unfitting one."""
    try:
        checkpoint = read_checkpoint(path)
    except CorruptCheckpoint as error:
        raise UserError(f"model.checkpoint {path}: {error}") from error
    problems = shared_faults(checkpoint)
    if problems:
        raise UserError(f"model.checkpoint {path} is corrupt: {problems[0]}")
    try:
        _load(model, checkpoint)
    except CorruptCheckpoint as error:
        raise UserError(
            f"model.checkpoint {path} does not fit the model of model.path: {error}"
        ) from error


@torch.no_grad()
def _load(model: Any, checkpoint: Checkpoint) -> None:
    manifest, problem = checkpoint.manifest, None
    tensors = {name: r for name, r in manifest.tensors.items() if name.startswith(f"{WEIGHTS}/")}
    tallies: dict[str, TensorTally] = {}
    try:
        with PieceReader(checkpoint.path, manifest.files) as reader:
            for place in placed_parameters([model], model.architecture):
                shard = _shard(place, model.architecture, tensors)
                load_shard(shard, reader, tensors)
                if shard.counts:
                    count(tallies, shard)
                place.parameter.copy_(shard.flat_N.view(place.parameter.shape))
    except CorruptCheckpoint as error:
        problem = str(error)
    if (found := first_error(problem)) is not None:
        raise CorruptCheckpoint(found)
    verify(tensors, tallies)


def _shard(
    place: PlacedParameter, architecture: Architecture, tensors: Mapping[str, TensorRecord]
) -> ParameterShard:
    """Room for this rank's part of a parameter, in the precision in which it is stored."""
    slot = slot_of(place, architecture)
    name = slot.weights
    dtype = dtype_named(tensors[name].dtype) if name in tensors else place.parameter.dtype
    return ParameterShard(
        name=name,
        shape=slot.shape,
        flat_N=torch.empty(place.parameter.numel(), dtype=dtype),
        begin=0,
        boxes=boxes(slot, place.size, place.rank),
        counts=original(place) and replicas(place)[0] == 0,
    )
