"""Counts the product's code: `python -m tests.sizes` prints statements and lines by package.

The product is megatron_async/ and kernels/; tests, benchmarks, examples and scripts are not
counted. A line of code is a line with a token that is neither a comment nor part of a docstring.
The limit of the whole product counts statements instead of lines, because a longer name or a
clearer message can add a line without adding code.
"""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
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
    """Count lines of code. Every string that is a statement by itself counts as a docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def statements(source: str) -> int:
    """Count statements, without docstrings. A `def` and each statement of its body count as one."""
    nodes = list(ast.walk(parse(source)))
    found = sum(isinstance(node, ast.stmt) for node in nodes)
    texts = (node.value for node in nodes if isinstance(node, ast.Expr))
    return found - sum(isinstance(t, ast.Constant) and isinstance(t.value, str) for t in texts)


def code_lines_of_functions(source: str) -> Iterator[tuple[str, int]]:
    """Yield the name and the lines of code of each function, including functions defined in it."""
    lines = source.splitlines()
    for node in ast.walk(parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            own = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            yield node.name, code_lines(own)


def product_files() -> list[Path]:
    """Return every Python file of the product."""
    return sorted(path for folder in PRODUCT for path in (ROOT / folder).rglob("*.py"))


def by_package(count: Callable[[str], int]) -> Counter[str]:
    """Sum `count` of each file's source by package, or by file for top-level modules."""
    packages: Counter[str] = Counter()
    for path in product_files():
        package = "/".join(path.relative_to(ROOT).parts[:2])
        packages[package] += count(path.read_text())
    return packages


if __name__ == "__main__":
    of_statements, of_lines = by_package(statements), by_package(code_lines)
    print("statements  lines")
    for package, number in of_statements.most_common():
        print(f"{number:10d} {of_lines[package]:6d} {package}")
    print(f"{of_statements.total():10d} {of_lines.total():6d} in total")
