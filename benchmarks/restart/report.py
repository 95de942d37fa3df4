"""The result file of `benchmarks.restart`: limits, and a column for each run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.reporting import Row, spread, table
from benchmarks.restart.counters import TRAINED_TOKENS
from benchmarks.restart.run import lengths

_BACK_SECONDS = 30.0
_ABOUT = """\
Each measured run is `megatron-async train` on simulated engines, with all responses of one batch in
flight. All its processes get SIGKILL when the engines have generated a random number of tokens, and
it is resumed until that batch is trained. A run from scratch generates the same responses without a
kill. What engines had generated at the kill is in memory-mapped counters
(`benchmarks/restart/counters.py`); what the store had is what requests after the resume begin with.
The simulated engines take no time to read a prompt, nor the tokens that a resumed response has."""
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

Lines before the seconds of a start are of the time until the kill, or until the batch is complete.
"""


def shown(rows: Sequence[Row]) -> str:
    """Return a table with a column for each run, and the median with the range."""
    lines = []
    for name, text, factor, digits in _FIGURES:
        if all(name in row for row in rows):
            values = [factor * row[name] for row in rows]
            cells = [f"{value:,.{digits}f}" for value in values]
            lines.append([text, *cells, spread(values, digits)])
    numbers = " | ".join(str(row["number"] + 1) for row in rows)
    return table(f"run | {numbers} | median (range)", lines)


def goals(rows: Sequence[Row], chunk_tokens: int) -> str:
    """Return the goals beside the worst figure of all runs."""
    still = max(row["engine_pauses"] + row["blocked"] for row in rows)
    lost, back, trained = (
        max(row[name] for row in rows) for name in ("lost_largest", "first_token", "trained")
    )
    limits = (
        ("pauses of generation for the store", 0, still),
        ("tokens lost of a response: one chunk", chunk_tokens, lost),
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
        f"Measured on {measured}. {answers:,} responses of {tokens / 1e6:.1f} million tokens, the "
        f"longest {options.longest:,}; engines send {options.stream_interval} tokens at a time, a "
        f"chunk of the store has {options.chunk_tokens} tokens or 2 s. The trainer gets the first "
        f"{TRAINED_TOKENS} tokens of each response.",
    ]
    if killed:
        parts += [goals(killed, options.chunk_tokens), "## Kills", shown(killed)]
    if scratch:
        parts += ["## The same responses from scratch", shown(scratch)]
    return "\n\n".join(parts)
