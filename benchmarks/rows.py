"""Raw results of a long comparison, one JSON object a line, so that it can be made in pieces.

A piece is what its `key` names; a piece that has a row already is not made again. Rows are appended
as soon as a piece has ended: whoever goes on later starts where the last one stopped.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def append(file: Path, row: Row) -> None:
    """Add a row to the end of the file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def read(file: Path) -> list[Row]:
    """All rows; none where there is no file yet."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def missing(wanted: Iterable[Row], rows: Sequence[Row]) -> list[Row]:
    """The pieces of `wanted` that no row holds, in their order."""
    return [key for key in wanted if not any(key.items() <= row.items() for row in rows)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """`median (least to most)`; the value alone where there is one."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"
