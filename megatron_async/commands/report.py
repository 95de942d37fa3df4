"""`megatron-async report`: the closing table of a run, and its page in HTML."""

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
    """Summarize the run in a table; `extra_phases` are (name, seconds) outside of RL."""
    table = Table(title=f"run {directory.path.name}", show_header=False, title_justify="left")
    table.add_column("what")
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
    """List the paths of TensorBoard logs, metrics and exported checkpoint, as far as they exist."""
    here = Path.cwd()
    places = (
        ("TensorBoard  tensorboard --logdir {}", directory.tensorboard),
        ("metrics      {}", directory.metrics_file),
        ("checkpoint   {} (Hugging Face format)", directory.hf_export),
    )
    return "\n".join(
        line.format(path.relative_to(here) if path.is_relative_to(here) else path)
        for line, path in places
        if path.exists()
    )


def write_report(runs: Sequence[Path], out: Path | None) -> Path:
    """The page about `runs`, in the first one's directory unless `out` is given. UserError."""
    from megatron_async.report.data import read_run
    from megatron_async.report.page import report_page

    page = report_page([read_run(run) for run in runs])
    file = out or runs[0] / "report.html"
    try:
        write_atomically(file, page)
    except CannotWrite as error:
        raise UserError(f"--out {file}: {error}" if out else str(error)) from error
    return file


def report_command(runs: Sequence[Path], out: Path | None) -> None:
    """Print the closing table of each run, and where the page is."""
    for run in runs:
        show_closing(RunDirectory.find(run, [])[0])
    Console(soft_wrap=True).print(f"report       {write_report(runs, out)}", highlight=False)


def show_closing(directory: RunDirectory) -> None:
    """The closing table, and where things are."""
    console = Console(soft_wrap=True)
    console.print(closing_table(summarize(directory), directory))
    console.print(where_things_are(directory), highlight=False)
