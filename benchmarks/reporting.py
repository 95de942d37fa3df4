"""Writes result files of benchmarks: raw rows, Markdown tables, and the command that made them.

A long comparison is split into pieces. When a piece ends, it appends one JSON object, its row, to a
file of rows. A piece whose row exists is not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def append(file: Path, row: Row) -> None:
    """Append one row to `file`; create the file if it is missing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as out:
        out.write(json.dumps(row) + "\n")


def read(file: Path) -> list[Row]:
    """Return all rows of `file`; an empty list if the file does not exist."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line]


def missing(wanted: Iterable[Row], rows: Sequence[Row]) -> list[Row]:
    """Return the keys of `wanted` that no row contains, in the order of `wanted`."""
    return [key for key in wanted if not any(key.items() <= row.items() for row in rows)]


def piece_options(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a comparison that consists of pieces: `--pieces`, `--rows`, `--table`."""
    file = RESULTS / f"{name}.jsonl"
    parser.add_argument("--pieces", type=int, default=1000, help="largest number of runs to make")
    parser.add_argument("--rows", type=Path, default=file, help="file of rows")
    parser.add_argument(
        "--table", action="store_true", help="only print the table of existing rows"
    )


def make_missing(
    wanted: Iterable[Row],
    rows: Sequence[Row],
    options: argparse.Namespace,
    measure: Callable[[Row], Row],
) -> None:
    """Measure each piece of `wanted` without a row in `rows`; append its row to `options.rows`."""
    todo = [] if options.table else missing(wanted, rows)
    for key in todo[: options.pieces]:
        row = {**key, **measure(key), "date": f"{datetime.date.today()}"}
        append(options.rows, row)
        print(row, file=sys.stderr, flush=True)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Return `median (smallest to largest)`, only the value if there is one, or `-` if none."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):,.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def table(header: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; ` | ` separates the columns in `header`."""
    lines = [f"| {header} |", "|---" * (header.count(" | ") + 1) + "|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def command_line(module: str) -> str:
    """Return `python -m MODULE` with the arguments of this process.

    `--out` is left out, because the path of the result file may exist only on one machine.
    """
    given, kept = iter(sys.argv[1:]), list[str]()
    for argument in given:
        if argument == "--out":
            next(given, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join(["python", "-m", module, *kept])


@cache
def commit() -> str:
    """Return the short hash of this tree's commit, or `unknown` without git.

    If the tree was copied without its history, set GPU_CHECK_COMMIT to the hash.
    """
    if (given := os.environ.get("GPU_CHECK_COMMIT")) is not None:
        return given
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def made(module: str) -> str:
    """Return one line with the command, the date and the machine of a result."""
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}"
    return f"`{command_line(module)}`, {datetime.date.today()}, {machine}"


def publish(module: str, title: str, text: str, out: Path | None) -> None:
    """Print `text`; if `out` is given, also write it there, after the title and `made(module)`."""
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(f"# {title}\n\n{made(module)}\n\n{text}\n")
