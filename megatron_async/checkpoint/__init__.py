"""Checkpoints of the trainer: sharded, verified, finalised by a manifest, loadable elsewhere."""

from megatron_async.checkpoint.manager import CheckpointManager, Finalised
from megatron_async.checkpoint.manifest import Checkpoint, Manifest, find_latest, open_checkpoint

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Finalised",
    "Manifest",
    "find_latest",
    "open_checkpoint",
]
