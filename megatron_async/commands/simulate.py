"""`megatron-async simulate`, `fit-lengths` and `plan`: run the simulator and print its results."""

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
"""Width of a table in characters, with --wide."""


def simulate_command(
    config: Path,
    overrides: Sequence[str],
    sweeps: Sequence[str],
    presets: str,
    plot_file: Path | None,
    wide: bool = False,
    all_assumptions: bool = False,
) -> None:
    """Simulate each combination of the values in `sweeps` and `presets`; print a table of the
    results, comments and assumptions.

    Raises:
        UserError: Bad input, or no point can be simulated.
    """
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
        console.print(f"wrote the plot to {plot_file}")
    if failed:
        where, error = failed[0]
        raise type(error)(
            f"{where}: {error} (results of {len(done)} of {len(points)} points are printed above)"
        )


def figures_command(config: Path, overrides: Sequence[str]) -> None:
    """Print the estimated memory, disk space and times of a run on nodes whose GPUs are
    `simulate.gpu`.

    The headers of the configuration files in `configs/` contain this output.
    """
    settings = load_simulation(config, overrides)
    per_node = settings.simulate.gpus_per_node
    nodes = Cluster(per_node, None, "0").rollout_nodes(settings)
    machine = Machine.of_nodes(per_node, nodes, settings.simulate.gpu)
    for line in estimate_lines(derive(settings, machine).config, machine):
        typer.echo(line)


def fit_command(file: Path, cut: int | None) -> None:
    """Fit a log-normal and a Weibull distribution to recorded response lengths; print both, and the
    settings for the one that fits better.

    Args:
        file: File with the lengths.
        cut: Number of tokens; responses of this length or more count as cut off there. None to use
            the lengths as recorded.

    Raises:
        UserError: The file has no usable lengths.
    """
    sample = read_recorded(file, "FILE")
    if cut is not None:
        sample = sample.cut_at(cut)
    fits = fit_lengths(sample)
    censored = int(sample.censored.sum())
    typer.echo(
        f"{len(sample.lengths)} responses of {sample.lengths.min():.0f} to "
        f"{sample.lengths.max():.0f} tokens; {censored} of them would have been longer (cut or "
        "unfinished)"
    )
    for fit in fits:
        values = ", ".join(f"{name} {value:.5g}" for name, value in fit.settings.items())
        typer.echo(
            f"{fit.distribution}: {values}; log-likelihood {fit.log_likelihood:.1f}, largest "
            f"difference of the distribution functions {fit.distance:.3f}"
        )
    typer.echo("settings of the likelier distribution, for `megatron-async simulate` (or `plan`):")
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
    """Search for layouts and schedules that train fast, simulate the best of them, and print them
    with the assumptions.

    Args:
        config: File with the settings.
        overrides: Settings that replace settings of the file.
        presets: Names of the schedule presets to consider, separated by commas; empty for that of
            the file, or for all if it names none.
        top: Number of plans to simulate and print; of each schedule and placement at least one is.
        wide: Whether to print a wide table.
        all_assumptions: Whether to print all assumptions instead of the most important three.

    Raises:
        UserError: Bad input, or no plan fits.
    """
    plan = make_plan(read_settings(config, overrides), top, _names(presets))
    best = plan.candidates[0]
    console = Console(width=_WIDTH) if wide else Console()
    console.print(plan_table(plan, wide=wide))
    if any(candidate.refused for candidate in plan.candidates):
        console.print("* A run refuses engines that share the GPUs of several nodes.")
    for line in plan.unusable:
        console.print(f"not compared: {line}", highlight=False)
    if len({c.config.schedule.preset for c in plan.candidates}) == 1:
        console.print("To compare with other schedules: --presets all")
    if plan.accepted:
        console.print(f"The nearest plan that a run accepts: {plan.accepted}", highlight=False)
    console.print("Settings of the best plan, to be merged into the file of a run:\n")
    console.print(plan_yaml(best), highlight=False, soft_wrap=True)
    _print_assumptions(console, [("best plan", best.config)], all_assumptions)


def _names(text: str) -> list[str]:
    """Split a comma-separated list into names."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _print_assumptions(
    console: Console, points: Sequence[tuple[str, SimulationConfig]], everything: bool
) -> None:
    """Print the three assumptions that change the results most; with `everything`, print all
    assumptions."""
    _, config = points[0]
    console.print("The three assumptions that change the results most:")
    for line in main_assumptions(config):
        console.print(f"- {line}", highlight=False)
    if not everything:
        console.print("To print all assumptions: --assumptions")
        return
    console.print("All assumptions:")
    for line in assumptions_of_all(points):
        console.print(f"- {line}", highlight=False)
