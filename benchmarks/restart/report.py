"""The result file of `benchmarks.restart`: goals, and a column for each run."""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Sequence

from benchmarks.command import command_line
from benchmarks.papers.report import table
from benchmarks.restart.counters import TRAINED_TOKENS
from benchmarks.restart.run import lengths
from benchmarks.rows import Row, spread
from megatron_async.trajectory.types import CHUNK_TOKENS

_BACK_SECONDS = 30.0
_WIDTH = 120
_ABOUT = """
Each measured run is `megatron-async train` on simulated engines, with all responses of one batch
(192 groups of 16) in flight. All its processes get SIGKILL when the engines have generated a random
number of tokens, and it is resumed until that batch is trained. A run from scratch generates the
same responses without a kill. What engines had generated at the kill is in memory-mapped counters
(`benchmarks/restart/counters.py`); what the store had is what requests after the resume begin with.
The simulated engines take no time to read a prompt, nor the tokens that a resumed response has.
"""
_KILLED = (
    ("generated", "tokens generated at the kill, millions", 1e-6, 2),
    ("unfinished", "unfinished responses then", 1, 0),
    ("partial", "their tokens, millions", 1e-6, 2),
    ("killed_after", "seconds from the start to the kill", 1, 0),
    ("lost_mean", "tokens lost per unfinished response, mean", 1, 1),
    ("lost_largest", "... largest", 1, 0),
    ("unsent_mean", "... mean of what the engine had not sent yet", 1, 1),
    ("file_bytes", "bytes of the store's files per generated token", 1, 2),
    ("written_bytes", "bytes that the manager wrote for it per generated token", 1, 2),
)
_PAUSES = (
    ("engine_pauses", "pauses that engines were asked for", 1, 0),
    ("step_ms", "decode step of an engine, mean ms", 1, 1),
    ("longest_step_ms", "... longest", 1, 0),
    ("blocked", "times that a stream was not read on, for the manager and its store", 1, 0),
    ("longest_blocked_ms", "... longest, ms", 1, 0),
    ("blocked_share", "... share of the time of all streams, %", 100, 3),
    ("commit_ms", "adding a chunk to the store and awaiting its commit, mean ms", 1, 2),
    ("longest_commit_ms", "... longest", 1, 0),
    ("commit_share", "... share of the time of all streams, %", 100, 3),
)
_SECONDS = (
    ("store_opened", "the store is open", 1, 1),
    ("opening", "... of which opening it (all tokens are read)", 1, 2),
    ("first_request", "the first request", 1, 1),
    ("first_token", "the first generated token", 1, 1),
    ("last_request", "every unfinished response is at an engine", 1, 1),
    ("batch", "the batch is complete: the whole rollout", 1, 1),
    ("generating", "... from the first token to there", 1, 1),
    ("trained", "the first batch is trained", 1, 1),
    ("busiest_share", "share of these tokens that the busier engine of two generated, %", 100, 0),
)
Shown = Sequence[tuple[str, str, float, int]]


def shown(rows: Sequence[Row], quantities: Shown, heading: str) -> str:
    """Return a table with a column for each run, and the median with the range."""
    lines = []
    for name, text, factor, digits in quantities:
        values = [factor * row[name] for row in rows]
        cells = [f"{value:,.{digits}f}" for value in values]
        lines.append([text, *cells, spread(values, digits)])
    head = [heading, *(str(row["number"] + 1) for row in rows), "median (range)"]
    return table(head, lines)


def generating(row: Row) -> float:
    """Return the seconds from the first token of a life to its complete batch."""
    return float(row["batch"] - row["first_token"])


def goals(rows: Sequence[Row]) -> str:
    """Return the three goals beside what was measured."""
    still = max(row["engine_pauses"] + row["blocked"] for row in rows)
    lost = max(row["lost_largest"] for row in rows)
    back = max(row["first_token"] for row in rows)
    last = max(rows, key=lambda row: row["trained"])
    lines = [
        ("no pause of generation for the store", still == 0, f"{still:.0f} pauses and waits"),
        (
            f"at most one chunk of {CHUNK_TOKENS} tokens of each response lost",
            lost <= CHUNK_TOKENS,
            f"at most {lost}",
        ),
        (
            f"generating again within {_BACK_SECONDS:g} s",
            back <= _BACK_SECONDS,
            f"at most {back:.1f} s to the first token",
        ),
        (
            f"the first batch trained within {_BACK_SECONDS:g} s",
            last["trained"] <= _BACK_SECONDS,
            f"at most {last['trained']:.1f} s, of which {generating(last):.1f} s are the "
            "generation of what the batch lacked",
        ),
    ]
    words = {True: "yes", False: "**no**"}
    return table(["goal, in every run", "met", "measured"], [(g, words[m], v) for g, m, v in lines])


def _fill(paragraph: str) -> str:
    if paragraph[0] in "#|":
        return paragraph
    return textwrap.fill(paragraph, _WIDTH, break_on_hyphens=False, break_long_words=False)


def report(rows: Sequence[Row], options: argparse.Namespace) -> str:
    """Return the result file."""
    rows = [{**row, "generating": generating(row)} for row in rows]
    killed = [row for row in rows if row["kind"] == "kill"]
    scratch = [row for row in rows if row["kind"] == "scratch"]
    made = ", ".join(sorted({f"{row['date']} at commit {row['commit']}" for row in rows}))
    answers = options.groups * options.group_size
    tokens = sum(lengths(answers, options.longest, options.seed))
    parts = [
        "# Everything killed, and resumed",
        _ABOUT.strip(),
        f"`{command_line('benchmarks.restart')}`, {made}, {os.cpu_count()} cores. {answers:,} "
        f"responses of {tokens / 1e6:.1f} million tokens, the longest {options.longest:,}; engines "
        f"send {options.stream_interval} tokens at a time, a chunk of the store has "
        f"{CHUNK_TOKENS} tokens or 2 s. The trainer gets the first {TRAINED_TOKENS} tokens "
        "of each response.",
    ]
    if killed:
        parts += [
            goals(killed),
            "## Kills",
            shown(killed, _KILLED, "until the kill"),
            shown(killed, _PAUSES, "generation until the kill"),
            shown(killed, _SECONDS, "seconds from the start of `--resume` until"),
        ]
    if scratch:
        parts += [
            "## The same responses from scratch",
            shown(scratch, _SECONDS, "seconds from the start until"),
            shown(scratch, _PAUSES, "generation until the batch is complete"),
        ]
    if killed and scratch:
        again = spread([row["batch"] for row in killed], 0)
        anew = spread([row["batch"] for row in scratch], 0)
        parts += [
            f"The second rollout: **{again} s** after a kill, {anew} s from scratch. Published "
            "elsewhere, on other hardware and not measured here: 57.8 s of pause for each capture "
            "of partial rollouts, and 518 s against 775 s for the second rollout."
        ]
    return "\n\n".join(map(_fill, parts)) + "\n"
