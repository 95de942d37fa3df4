"""Provides fixtures for tests that train: a small model that no test changes, and the end of the
process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.cases import single_process, write_model


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def process() -> Iterator[None]:
    """End the process group that a trainer in the test process starts."""
    with single_process():
        yield
