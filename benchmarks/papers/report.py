"""Shared parts of the scripts beside this one: a simulated point, a Markdown table, a result file.

Every result file has the command that made it, what the source reports, and the negative
control; the numbers in it come from that run and from nowhere else.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.command import command_line
from megatron_async.config.load import load_simulation
from megatron_async.simulate.build import simulate
from megatron_async.simulate.statistics import Summary

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs" / "simulate"
RESULTS = ROOT / "benchmarks" / "results" / "papers"
UNIFORM = ("simulate.lengths.distribution=constant",)
"""The negative control: every response has the distribution's median length."""


@cache
def point(config: str, *overrides: str) -> Summary:
    """One simulated point of `configs/simulate/CONFIG.yaml`; equal points are simulated once."""
    print(f"{config} {' '.join(overrides)}", file=sys.stderr, flush=True)
    return simulate(load_simulation(CONFIGS / f"{config}.yaml", list(overrides)))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Options that every script has."""
    out = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    out.add_argument(
        "--out", type=Path, default=RESULTS / f"{name}.md", help="Markdown file to write"
    )
    return out


def write(options: argparse.Namespace, script: str, title: str, parts: Sequence[str]) -> None:
    """Print the parts and write them with the command that made them."""
    command = command_line(f"benchmarks.papers.{script}")
    text = "\n\n".join([f"# {title}", f"`{command}`, {datetime.date.today()}", *parts, ""])
    print(text)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text)
