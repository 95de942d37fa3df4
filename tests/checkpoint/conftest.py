"""Provides the trainer's fixtures to the tests of checkpoints."""

from tests.trainer.conftest import model_dir, process

__all__ = ["model_dir", "process"]
