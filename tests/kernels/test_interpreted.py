"""Runs the tests that compare the Triton kernels with the references in Triton's interpreter on CPU
tensors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
MODULES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("module", MODULES)
def test_interpreted_kernels_pass_the_tests_of_module(module: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    finished = subprocess.run(
        [*command, str(FOLDER / module)],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
