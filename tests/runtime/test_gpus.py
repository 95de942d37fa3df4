"""Tests the detection of a GPU, with and without torch imported."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_async.runtime.gpus import sees_gpu

_ALONE = """
import sys
from pathlib import Path
from megatron_async.runtime import gpus
if sys.argv[1:]:
    gpus._DRIVER_FILES = ("null",)
print(gpus.sees_gpu(), "torch" in sys.modules)
"""


def alone(*driver: str) -> str:
    command = [sys.executable, "-c", _ALONE, *driver]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_sees_gpu_asks_torch_when_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert sees_gpu() is found


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_sees_gpu_imports_torch_only_when_a_driver_is_installed() -> None:
    assert alone() == "False False\n"
    assert alone("a driver's file") == "False True\n"
