"""What `megatron-async simulate` and `megatron-async plan` print."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from megatron_async.simulate.assumptions import assumptions, assumptions_of_all
from megatron_async.simulate.planner import make_plan, plan_table
from megatron_async.simulate.show import label, notes, plot, table
from megatron_async.simulate.sweep import Point, read_settings, run_points, sweep_points

_GC_THRESHOLD = 100_000
"""New objects between two searches for unreachable cycles, of which a simulation makes few."""
_WIDTH = 220
"""Columns: a row of figures is not to be folded."""


def simulate_command(
    config: Path,
    overrides: Sequence[str],
    sweeps: Sequence[str],
    presets: str,
    plot_file: Path | None,
) -> None:
    """Simulate, print the table, what was noticed and what was assumed. Raises UserError."""
    settings = read_settings(config, overrides)
    points = sweep_points(sweeps, [name.strip() for name in presets.split(",") if name.strip()])
    began = time.perf_counter()
    gc.set_threshold(_GC_THRESHOLD)

    def told(point: Point) -> None:
        spent = time.perf_counter() - began
        typer.echo(f"{' '.join(point.labels) or config}: done after {spent:.1f} s", err=True)

    done = run_points(settings, points, told)
    console = Console(width=_WIDTH)
    console.print(table(done))
    for line in notes(done):
        console.print(f"- {line}", highlight=False)
    console.print("Assumed and given:")
    for line in assumptions_of_all([(label(point), point.config) for point in done]):
        console.print(f"- {line}", highlight=False)
    if plot_file is not None:
        plot(done, plot_file)
        console.print(f"plot in {plot_file}")


def plan_command(config: Path, overrides: Sequence[str], top: int) -> None:
    """Search, simulate the best, print them and what was assumed. Raises UserError."""
    plan = make_plan(read_settings(config, overrides), top)
    console = Console(width=_WIDTH)
    console.print(plan_table(plan))
    console.print(plan.sentence)
    console.print("Assumed and given (for the best):")
    for line in assumptions(plan.candidates[0].config):
        console.print(f"- {line}", highlight=False)
