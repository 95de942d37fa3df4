"""Counts the product's lines of code: `python -m tests.sizes` prints them by room.

A line of code holds a token that is no comment and no docstring. The product is megatron_async/ and
kernels/; tests, benchmarks, examples and scripts are not counted.
"""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.syntax import parse

ROOT = Path(__file__).parents[1]
PRODUCT = ("megatron_async", "kernels/megatron_async_kernels")
_NO_CODE = frozenset(
    [
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    ]
)


def code_lines(source: str) -> int:
    """Count lines of code; a bare string, wherever it stands, is a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def code_lines_of_functions(source: str) -> Iterator[tuple[str, int]]:
    """Name and lines of code of each function, what is defined inside it included."""
    lines = source.splitlines()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            yield node.name, code_lines(own)


def product_files() -> list[Path]:
    """Every Python file of the product."""
    return sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))


def lines_by_room() -> Counter[str]:
    """Count lines of code by room, or by file at the top."""
    rooms: Counter[str] = Counter()
    for path in product_files():
        room = "/".join(path.relative_to(ROOT).parts[:2])
        rooms[room] += code_lines(path.read_text())
    return rooms


if __name__ == "__main__":
    found = lines_by_room()
    print("\n".join(f"{count:6d} {room}" for room, count in found.most_common()))
    print(f"{found.total():6d} in all")
