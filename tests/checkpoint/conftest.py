"""The trainer's fixtures, which these tests need too."""

from tests.trainer.conftest import model_dir, process

__all__ = ["model_dir", "process"]
