"""What a process imports when it starts, and which precision the quickstart trains in."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from megatron_async.commands.quickstart import quick_dtype
from megatron_async.config import build_config

_IMPORTED = """
import sys, torch
compile = torch.compile
from megatron_async.trainer.device import import_megatron
import_megatron()
import megatron_async.trainer.step
assert "megatron.core" in sys.modules
assert "torch._inductor.compile_fx" not in sys.modules, "the compiler was imported"
assert torch.compile is compile
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Megatron compiles")
def test_a_rank_on_a_cpu_starts_without_the_compiler() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("found", "asked", "chosen"),
    [
        ({"avx512_bf16": True}, "auto", "bfloat16"),
        ({"amx_bf16": True}, "auto", "bfloat16"),
        ({"avx512_bf16": False}, "auto", "auto"),
        ({}, "auto", "auto"),
        ({"avx512_bf16": True}, "float32", "float32"),
    ],
)
def test_fine_tuning_is_in_bfloat16_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, found: dict[str, bool], asked: str, chosen: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert quick_dtype(build_config({"model": {"dtype": asked}})) == chosen
