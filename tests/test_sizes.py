"""Tests that the product stays small: every file is short enough to read at once, and code does not
accumulate."""

from __future__ import annotations

from tests.sizes import (
    ROOT,
    by_package,
    code_lines,
    code_lines_of_functions,
    product_files,
    statements,
)

MAX_CODE_LINES_OF_A_FILE = 400
LONGER_FILES: dict[str, str] = {}
MAX_CODE_LINES_OF_A_FUNCTION = 60  # Kernels are exempt: a pass over tiles is one function.
# The limit is raised only by as much as an issue permits, and lowered when the count has fallen.
MAX_STATEMENTS = 30_891


def test_files_of_the_product_are_short() -> None:
    counts = {p.relative_to(ROOT).as_posix(): code_lines(p.read_text()) for p in product_files()}
    long = {name for name, count in counts.items() if count > MAX_CODE_LINES_OF_A_FILE}
    assert long == set(LONGER_FILES), {name: counts[name] for name in long ^ set(LONGER_FILES)}


def test_functions_outside_kernels_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {name} has {count}"
        for path in product_files()
        if not path.is_relative_to(ROOT / "kernels")
        for name, count in code_lines_of_functions(path.read_text())
        if count > MAX_CODE_LINES_OF_A_FUNCTION
    ]
    assert not long


def test_product_has_at_most_the_permitted_statements() -> None:
    count = by_package(statements).total()
    assert count <= MAX_STATEMENTS, f"{count} statements; `python -m tests.sizes` lists them"
