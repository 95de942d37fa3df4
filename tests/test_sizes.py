"""The product stays small: every file can be read at one sitting, and code does not pile up."""

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
MAX_CODE_LINES_OF_A_FUNCTION = 60  # kernels are apart: one pass over their tiles is one function
# The limit is raised only by what an issue grants, and lowered when the count has fallen.
MAX_STATEMENTS = 30_544


def test_a_file_has_few_lines_of_code_or_a_reason() -> None:
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


def test_the_product_stays_within_its_statements() -> None:
    count = by_package(statements).total()
    assert count <= MAX_STATEMENTS, f"{count} statements; `python -m tests.sizes` lists them"
