"""The weights alone of a checkpoint into a model: a new run's starting point.

Invariants
- Collective. Every file is verified first (ranks share the reading), so nothing is half loaded, and
  no pickle in it is read that holds more than values.
- The checkpoint may be of any layout and precision; the parameters keep theirs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.distributed.checkpoint.api import CheckpointException

from megatron_async.checkpoint.manager import shared_faults
from megatron_async.checkpoint.manifest import CorruptCheckpoint, read_checkpoint
from megatron_async.checkpoint.state import load_weights, sharded_weights
from megatron_async.errors import UserError


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
        loaded = dist_checkpointing.load({"model": sharded_weights(model)}, str(path))
    except (CheckpointException, CheckpointingException, KeyError, ValueError) as error:
        raise UserError(
            f"model.checkpoint {path} does not fit the model of model.path: {error}"
        ) from error
    missing, unexpected = load_weights(model, loaded["model"])
    if missing or unexpected:
        raise UserError(
            f"model.checkpoint {path} does not fit the model of model.path: "
            f"missing {missing[:3]}, unexpected {unexpected[:3]}"
        )
