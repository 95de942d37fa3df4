"""`megatron-async report`: prints the closing table of a run (its totals) and writes its HTML
page."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_async.errors import UserError
from megatron_async.files.disk import CannotWrite
from megatron_async.rollout.evaluate import EvalResult
from megatron_async.run_directory import RunDirectory, write_atomically
from megatron_async.telemetry.metrics import sampling_name
from megatron_async.telemetry.summary import RunSummary, percent, summarize


def closing_table(
    summary: RunSummary,
    directory: RunDirectory,
    *,
    before_sft: EvalResult | None = None,
    extra_phases: Sequence[tuple[str, float]] = (),
) -> Table:
    """Return a table that summarizes the run.

    Args:
        summary: Totals of the run.
        directory: The run directory.
        before_sft: Evaluation of the model before fine-tuning; None for runs without that stage.
        extra_phases: Name and seconds of each stage outside of RL.
    """
    table = Table(title=f"run {directory.path.name}", show_header=False, title_justify="left")
    table.add_column("name")
    table.add_column("value", justify="right")

    if before_sft is not None:
        table.add_row(
            f"held-out accuracy before SFT ({sampling_name(before_sft.temperature)})",
            percent(before_sft.accuracy),
        )
    for name, text in summary.facts("at the start" if before_sft is None else "after SFT"):
        table.add_row(name, text)
    phases = [(f"RL: {phase}", seconds) for phase, seconds in summary.seconds_by_phase.items()]
    for name, seconds in (*extra_phases, *phases):
        table.add_row(f"wall time, {name}", f"{seconds:,.1f} s")
    return table


def where_things_are(directory: RunDirectory) -> str:
    """Return lines with the paths of the run's TensorBoard logs, metrics and exported checkpoint;
    paths that do not exist are left out."""
    current = Path.cwd()
    results = (
        ("TensorBoard  tensorboard --logdir {}", directory.tensorboard),
        ("metrics      {}", directory.metrics_file),
        ("checkpoint   {} (Hugging Face format)", directory.hf_export),
    )
    return "\n".join(
        line.format(path.relative_to(current) if path.is_relative_to(current) else path)
        for line, path in results
        if path.exists()
    )


def write_report(runs: Sequence[Path], out: Path | None) -> Path:
    """Write one HTML page about `runs` and return its path.

    `out` is the page's file; None means report.html in the directory of the first run.

    Raises:
        UserError: A run cannot be read, or the page cannot be written.
    """
    from megatron_async.report.data import read_run
    from megatron_async.report.page import report_page

    page = report_page([read_run(run) for run in runs])
    file = out or runs[0] / "report.html"
    try:
        write_atomically(file, page)
    except CannotWrite as error:
        raise UserError(f"--out is {file}: {error}" if out else str(error)) from error
    return file


def report_command(runs: Sequence[Path], out: Path | None) -> None:
    """Print the closing table of each run, write the report page, and print its path."""
    for run in runs:
        show_closing(RunDirectory.find(run, [])[0])
    Console(soft_wrap=True).print(f"report       {write_report(runs, out)}", highlight=False)


def show_closing(directory: RunDirectory) -> None:
    """Print the closing table of a run and the paths of its results."""
    console = Console(soft_wrap=True)
    console.print(closing_table(summarize(directory), directory))
    console.print(where_things_are(directory), highlight=False)
