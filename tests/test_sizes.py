"""The product stays small: every file can be read at one sitting, and code does not pile up."""

from __future__ import annotations

from tests.sizes import (
    ROOT,
    code_lines,
    code_lines_of_functions,
    lines_by_room,
    product_files,
)

MOST_CODE_LINES_OF_A_FILE = 400
LONGER_FILES: dict[str, str] = {}
MOST_CODE_LINES_OF_A_FUNCTION = 60  # kernels are apart: one pass over their tiles is one function
# It rises only by what an issue grants, and is lowered when the count has fallen.
MOST_CODE_LINES = 39_826


def test_a_file_has_few_lines_of_code_or_a_reason() -> None:
    counts = {p.relative_to(ROOT).as_posix(): code_lines(p.read_text()) for p in product_files()}
    long = {name for name, count in counts.items() if count > MOST_CODE_LINES_OF_A_FILE}
    assert long == set(LONGER_FILES), {name: counts[name] for name in long ^ set(LONGER_FILES)}


def test_functions_outside_kernels_are_short() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {name} has {count}"
        for path in product_files()
        if not path.is_relative_to(ROOT / "kernels")
        for name, count in code_lines_of_functions(path.read_text())
        if count > MOST_CODE_LINES_OF_A_FUNCTION
    ]
    assert not long


def test_the_product_stays_within_its_lines() -> None:
    count = lines_by_room().total()
    assert count <= MOST_CODE_LINES, f"{count} lines of code; `python -m tests.sizes` lists them"
