"""Shared functions of the scripts in this package: options, simulations and result files.

Every result file has the command that made it, the numbers of the source, and the negative control.
All other numbers come from the run of that command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from benchmarks.reporting import RESULTS, ROOT, publish
from megatron_async.config.load import load_simulation
from megatron_async.simulate.build import simulate
from megatron_async.simulate.statistics import Summary

CONFIGS = ROOT / "configs" / "simulate"
UNIFORM = ("simulate.lengths.distribution=constant",)
"""Overrides of a negative control: every response has the median length of the distribution."""


@cache
def point(config: str, *overrides: str) -> Summary:
    """Simulate `configs/simulate/CONFIG.yaml` with overrides; repeat no earlier simulation."""
    print(f"{config} {' '.join(overrides)}", file=sys.stderr, flush=True)
    return simulate(load_simulation(CONFIGS / f"{config}.yaml", list(overrides)))


def parser(doc: str | None, script: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every script has."""
    out = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    file = RESULTS / "papers" / f"{script}.md"
    out.add_argument("--out", type=Path, default=file, help="Markdown file to write")
    out.set_defaults(script=script)
    return out


def write(options: argparse.Namespace, title: str, parts: Sequence[str]) -> None:
    """Print the parts, and write them to `options.out` with the command that made them."""
    publish(f"benchmarks.papers.{options.script}", title, "\n\n".join(parts), options.out)
