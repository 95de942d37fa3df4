"""Output of `megatron-async simulate`, `fit-lengths` and `plan`."""

import time
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.console import Console

from megatron_async.commands.launch import Cluster
from megatron_async.config.load import load_simulation, read_settings
from megatron_async.config.simulate import SimulationConfig
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.estimates import estimate_lines
from megatron_async.simulate.assumptions import assumptions_of_all, main_assumptions
from megatron_async.simulate.lengths import fit_lengths, read_recorded
from megatron_async.simulate.plan_show import plan_table, plan_yaml
from megatron_async.simulate.planner import make_plan
from megatron_async.simulate.show import check_plot, comments, label, plot, table, warnings
from megatron_async.simulate.sweep import Point, run_points, sweep_points

_WIDTH = 220
"""Columns of a table with --wide."""


def simulate_command(
    config: Path,
    overrides: Sequence[str],
    sweeps: Sequence[str],
    presets: str,
    plot_file: Path | None,
    wide: bool = False,
    all_assumptions: bool = False,
) -> None:
    """Simulate, print the table, what was noticed and what was assumed. Raises UserError."""
    check_plot(plot_file)
    settings = read_settings(config, overrides)
    points = sweep_points(sweeps, _names(presets))
    began = time.perf_counter()

    def report(point: Point) -> None:
        spent = time.perf_counter() - began
        typer.echo(f"{' '.join(point.labels) or config}: done after {spent:.1f} s", err=True)

    done, failed = run_points(settings, points, report)
    if not done:
        raise failed[0][1]
    console = Console(width=_WIDTH) if wide else Console()
    console.print(table(done, wide=wide))
    for line in [*(line for point in done for line in comments(point)), *warnings(done)]:
        console.print(f"- {line}", highlight=False)
    _print_assumptions(console, [(label(point), point.config) for point in done], all_assumptions)
    if plot_file is not None:
        plot(done, plot_file)
        console.print(f"plot in {plot_file}")
    if failed:
        where, error = failed[0]
        raise type(error)(f"{where}: {error} ({len(done)} of {len(points)} points are above)")


def figures_command(config: Path, overrides: Sequence[str]) -> None:
    """Print what the run takes on nodes of `simulate.gpu`: the header of a shipped file."""
    settings = load_simulation(config, overrides)
    per_node = settings.simulate.gpus_per_node
    nodes = Cluster(per_node, None, "0").rollout_nodes(settings)
    machine = Machine.of_nodes(per_node, nodes, settings.simulate.gpu)
    for line in estimate_lines(derive(settings, machine).config, machine):
        typer.echo(line)


def fit_command(file: Path, cut: int | None) -> None:
    """Fit recorded lengths, print what came out and how to use it. Raises UserError."""
    sample = read_recorded(file, "FILE")
    if cut is not None:
        sample = sample.cut_at(cut)
    fits = fit_lengths(sample)
    censored = int(sample.censored.sum())
    typer.echo(
        f"{len(sample.lengths)} responses of {sample.lengths.min():.0f} to "
        f"{sample.lengths.max():.0f} tokens; {censored} would have been longer (cut or unfinished)"
    )
    for fit in fits:
        values = ", ".join(f"{name} {value:.5g}" for name, value in fit.settings.items())
        typer.echo(
            f"{fit.distribution}: {values}; log-likelihood {fit.log_likelihood:.1f}, largest "
            f"difference of the distribution functions {fit.distance:.3f}"
        )
    typer.echo("the likelier one, for `megatron-async simulate` (or `plan`):")
    best = {"distribution": fits[0].distribution}
    best |= {name: f"{value:.5g}" for name, value in fits[0].settings.items()}
    typer.echo("  " + " ".join(f"--set simulate.lengths.{k}={v}" for k, v in best.items()))


def plan_command(
    config: Path,
    overrides: Sequence[str],
    presets: str,
    top: int,
    wide: bool = False,
    all_assumptions: bool = False,
) -> None:
    """Search, simulate the best plans, print them and what was assumed. Raises UserError."""
    plan = make_plan(read_settings(config, overrides), top, _names(presets))
    best = plan.candidates[0]
    console = Console(width=_WIDTH) if wide else Console()
    console.print(plan_table(plan, wide=wide))
    if any(candidate.refused for candidate in plan.candidates):
        console.print("* A run refuses engines that share GPUs over several nodes today.")
    for line in plan.unusable:
        console.print(f"not compared: {line}", highlight=False)
    if len({c.config.schedule.preset for c in plan.candidates}) == 1:
        console.print("To compare it with the other schedules: --presets all")
    if plan.accepted:
        console.print(f"The nearest that a run accepts: {plan.accepted}", highlight=False)
    console.print("Settings of the best plan, to merge into the file of a run:\n")
    console.print(plan_yaml(best), highlight=False, soft_wrap=True)
    _print_assumptions(console, [("best plan", best.config)], all_assumptions)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _print_assumptions(
    console: Console, points: Sequence[tuple[str, SimulationConfig]], everything: bool
) -> None:
    """Print the three assumptions that change the results most, or all of them."""
    _, config = points[0]
    console.print("Assumed; these three change the results most:")
    for line in main_assumptions(config):
        console.print(f"- {line}", highlight=False)
    if not everything:
        console.print("All others: --assumptions")
        return
    console.print("All figures and assumptions:")
    for line in assumptions_of_all(points):
        console.print(f"- {line}", highlight=False)
