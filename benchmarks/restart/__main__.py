"""Measures the costs of a kill of all processes: lost tokens, pauses, and seconds until training.

    python -m benchmarks.restart [--kills 5] [--scratch 1] [--seed 1]

Runs whose row exists in `--rows` are not repeated.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks import reporting
from benchmarks.reporting import RESULTS, Row, spread, table
from benchmarks.restart.counters import TRAINED_TOKENS
from benchmarks.restart.run import RestartedRun, killed_run, lengths, scratch_run
from megatron_async.trajectory.types import CHUNK_TOKENS
from tests.crash.run import prepare

_PROBLEMS = 1000  # more than the groups of a batch, which must not contain a problem twice
_BACK_SECONDS = 30.0
_ABOUT = """\
Each measured run is `megatron-async train` on simulated engines, with all responses of one batch in
flight. When the engines have generated a random number of tokens, all processes of the run get
SIGKILL. Then the run is resumed until that batch is trained. A run from scratch generates the same
responses without a kill. Memory-mapped counters (`benchmarks/restart/counters.py`) contain the
number of tokens that engines had generated at the kill. The number of tokens in the store is the
length with which requests start after the resume. The simulated engines take no time to read a
prompt or the tokens of a resumed response."""
_FIGURES = (
    ("generated", "tokens generated at the kill, millions", 1e-6, 2),
    ("unfinished", "unfinished responses then", 1, 0),
    ("killed_after", "seconds from the start to the kill", 1, 0),
    ("lost_mean", "tokens lost per unfinished response, mean", 1, 1),
    ("lost_largest", "... largest", 1, 0),
    ("file_bytes", "bytes of the store's files per generated token", 1, 2),
    ("engine_pauses", "pauses that engines were asked for", 1, 0),
    ("step_ms", "decode step of an engine, mean ms", 1, 1),
    ("longest_step_ms", "... longest", 1, 0),
    ("blocked", "times that a stream was not read on, for the manager and its store", 1, 0),
    ("longest_blocked_ms", "... longest, ms", 1, 0),
    ("commit_ms", "adding a chunk to the store and awaiting its commit, mean ms", 1, 2),
    ("longest_commit_ms", "... longest", 1, 0),
    ("first_request", "seconds from the (second) start until the first request", 1, 1),
    ("first_token", "... the first generated token", 1, 1),
    ("last_request", "... every unfinished response is at an engine", 1, 1),
    ("batch", "... the batch is complete: the whole rollout", 1, 1),
    ("trained", "... the first batch is trained", 1, 1),
)
"""Name in the rows, description, factor and decimal places of each line of the tables.

Lines before `first_request` describe the time until the kill or, without a kill, until the batch is
complete.
"""


def shown(rows: Sequence[Row]) -> str:
    """Return a table with a column for each run and a column with median and range."""
    lines = []
    for name, text, factor, digits in _FIGURES:
        if all(name in row for row in rows):
            values = [factor * row[name] for row in rows]
            cells = [f"{value:,.{digits}f}" for value in values]
            lines.append([text, *cells, spread(values, digits)])
    numbers = " | ".join(str(row["number"] + 1) for row in rows)
    return table(f"run | {numbers} | median (range)", lines)


def goals(rows: Sequence[Row]) -> str:
    """Return a table that compares each goal with the worst measurement of all runs."""
    still = max(row["engine_pauses"] + row["blocked"] for row in rows)
    lost, back, trained = (
        max(row[name] for row in rows) for name in ("lost_largest", "first_token", "trained")
    )
    limits = (
        ("pauses of generation for the store", 0, still),
        ("tokens lost of a response: one chunk", CHUNK_TOKENS, lost),
        ("seconds until the first token", _BACK_SECONDS, back),
        ("seconds until the first batch is trained", _BACK_SECONDS, trained),
    )
    lines = [
        (text, f"{limit:g}", f"{measured:.1f}", "yes" if measured <= limit else "**no**")
        for text, limit, measured in limits
    ]
    return table("in every run, at most | goal | measured | met", lines)


def report(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """Return the text of the result file."""
    killed = [row for row in rows if row["kind"] == "kill"]
    scratch = [row for row in rows if row["kind"] == "scratch"]
    measured = ", ".join(sorted({f"{row['date']} at commit {row['commit']}" for row in rows}))
    answers = options.groups * options.group_size
    tokens = sum(lengths(answers, options.longest, options.seed))
    parts = [
        _ABOUT,
        f"Measured on {measured}. The {answers:,} responses have {tokens / 1e6:.1f} million tokens "
        f"together, and the longest has {options.longest:,}. Engines send "
        f"{options.stream_interval} tokens at a time. A chunk of the store has {CHUNK_TOKENS} "
        "tokens, or the tokens of 2 s. The trainer gets only the first "
        f"{TRAINED_TOKENS} tokens of each response.",
    ]
    if killed:
        parts += [goals(killed), "## Kills", shown(killed)]
    if scratch:
        parts += ["## The same responses from scratch", shown(scratch)]
    return "\n\n".join(parts)


@contextmanager
def folder_of_runs() -> Iterator[Path]:
    """Yield a temporary directory with the model and the problems."""
    with tempfile.TemporaryDirectory(prefix="restart-") as scratch:
        root = Path(scratch)
        prepare(root)
        problems = [{"prompt": f"{i}+7=", "answer": i + 7} for i in range(_PROBLEMS)]
        (root / "problems.jsonl").write_text("\n".join(map(json.dumps, problems)))
        yield root


def measure(piece: Row, root: Path, options: argparse.Namespace) -> Row:
    """Make one run and remove its files; return its row without the key."""
    name = f"{piece['kind']}{piece['number']}"
    run = RestartedRun(root, name, options)
    total = sum(run.config["experiment"]["forced_lengths"])
    if piece["kind"] == "scratch":
        row = scratch_run(run)
    else:
        share = random.Random(f"{options.seed} {name}").uniform(*options.moments)
        row = killed_run(run, share * total)
    shutil.rmtree(run.directory.path)
    return {**row, "commit": reporting.commit()}


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; return the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--scratch", type=int, default=1, help="runs without a kill")
    parser.add_argument("--seed", type=int, default=1, help="seed of lengths, prompts and kills")
    parser.add_argument("--groups", type=int, default=192)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--longest", type=int, default=5500, help="longest response, in tokens")
    parser.add_argument(
        "--step-seconds", type=float, default=0.04, help="seconds of an engine's decode step"
    )
    parser.add_argument("--stream-interval", type=int, default=16)
    parser.add_argument(
        "--moments",
        type=float,
        nargs=2,
        default=(0.5, 0.7),
        help="range of the kill, in shares of all tokens",
    )
    reporting.piece_options(parser, "restart")
    parser.add_argument("--out", type=Path, default=RESULTS / "restart.md")
    return parser.parse_args(arguments)


def main() -> None:
    options = parsed()
    # SIGTERM must end the run too, so it raises SystemExit here.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    wanted: list[Row] = [{"kind": "kill", "number": i} for i in range(options.kills)]
    wanted[1:1] = [{"kind": "scratch", "number": i} for i in range(options.scratch)]
    with folder_of_runs() as root:
        reporting.make_missing(
            wanted,
            reporting.read(options.rows),
            options,
            lambda piece: measure(piece, root, options),
        )
    text = report(reporting.read(options.rows), options)
    reporting.publish("benchmarks.restart", "Everything killed, and resumed", text, options.out)


if __name__ == "__main__":
    main()
