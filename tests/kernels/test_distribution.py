"""Tests that the kernels, a separate distribution, import only torch, triton and the standard
library."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from tests.syntax import parse

KERNELS = Path(__file__).parents[2] / "kernels"
FILES = sorted(KERNELS.rglob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_kernels_import_only_torch_and_triton(file: Path) -> None:
    imported = set()
    for node in ast.walk(parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").partition(".")[0])
    allowed = {"torch", "triton", "megatron_async_kernels", *sys.stdlib_module_names}
    assert imported <= allowed
