"""What a kill of everything costs: tokens, pauses of generation, and seconds until the run is back.

    python -m benchmarks.restart [--kills 5] [--scratch 1] [--seed 1]

Runs that have a row in `--rows` are not made again.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.restart.report import report
from benchmarks.restart.run import RestartedRun, killed_run, scratch_run
from benchmarks.rows import Row, append, missing, read
from benchmarks.versus_trl import commit
from tests.crash.run import prepare

RESULTS = Path(__file__).parents[1] / "results"
_PROBLEMS = 1000  # a batch may hold none twice


@contextmanager
def folder_of_runs() -> Iterator[Path]:
    """A folder with the model and the problems."""
    with tempfile.TemporaryDirectory(prefix="restart-") as scratch:
        root = Path(scratch)
        prepare(root)
        problems = [{"prompt": f"{i}+7=", "answer": i + 7} for i in range(_PROBLEMS)]
        (root / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
        yield root


def measure(piece: Row, root: Path, options: argparse.Namespace) -> Row:
    """Make one run and remove what it wrote."""
    name = f"{piece['kind']}{piece['number']}"
    run = RestartedRun(root, name, options)
    total = sum(run.config["experiment"]["forced_lengths"])
    if piece["kind"] == "scratch":
        row = scratch_run(run)
    else:
        share = random.Random(f"{options.seed} {name}").uniform(*options.moments)
        row = killed_run(run, share * total, options.stream_interval)
    shutil.rmtree(run.directory.path)
    made = {"date": str(datetime.date.today()), "commit": commit()}
    return {**piece, **row, **made}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--scratch", type=int, default=1, help="runs without a kill")
    parser.add_argument("--seed", type=int, default=1, help="of lengths, prompts and kills")
    parser.add_argument("--groups", type=int, default=192)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--longest", type=int, default=5500, help="tokens of a response")
    parser.add_argument("--step-seconds", type=float, default=0.04, help="of an engine")
    parser.add_argument("--stream-interval", type=int, default=16)
    parser.add_argument(
        "--moments", type=float, nargs=2, default=(0.5, 0.7), help="shares of the batch's tokens"
    )
    parser.add_argument("--rows", type=Path, default=RESULTS / "restart.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS / "restart.md")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    # So that a run is not left behind.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    wanted: list[Row] = [{"kind": "kill", "number": i} for i in range(options.kills)]
    wanted[1:1] = [{"kind": "scratch", "number": i} for i in range(options.scratch)]
    with folder_of_runs() as root:
        for piece in missing(wanted, read(options.rows)):
            append(options.rows, row := measure(piece, root, options))
            print(json.dumps(row), flush=True)
            options.out.write_text(report(read(options.rows), options))
    options.out.write_text(report(read(options.rows), options))


if __name__ == "__main__":
    main()
