"""Tests that docstrings name only parameters that exist."""

from __future__ import annotations

import ast
import re

from tests.sizes import ROOT, product_files
from tests.syntax import parse

_SECTION = re.compile(r"^Args:\n((?: +.*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^    \*{0,2}(\w+):", re.MULTILINE)


def documented(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names in the `Args:` section of a function's docstring."""
    section = _SECTION.search(ast.get_docstring(function) or "")
    return set(_ENTRY.findall(section[1])) if section else set()


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Return the names of a function's parameters."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}


def test_args_sections_name_parameters_that_exist() -> None:
    wrong = [
        f"{file.relative_to(ROOT)}: {function.name} has no {name}"
        for file in product_files()
        for function in ast.walk(parse(file.read_text()))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name in sorted(documented(function) - parameters(function))
    ]
    assert wrong == []
