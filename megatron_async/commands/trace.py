"""`megatron-async trace RUN_DIR`: writes a file in which the viewer Perfetto shows the newest steps
of a run on a time axis."""

import json
from pathlib import Path

import typer

from megatron_async.errors import UserError
from megatron_async.files.disk import CannotWrite
from megatron_async.report.trace import Trace
from megatron_async.run_directory import RunDirectory, write_atomically
from megatron_async.scheduler.record import read_record, record_files
from megatron_async.telemetry.metrics import read_metrics


def trace_command(run: Path, out: Path | None) -> None:
    """Write the trace of a run and print its path.

    Raises:
        UserError: The run has no events with times, or the file cannot be written.
    """
    directory, _ = RunDirectory.find(run, [])
    file = out or directory.path / "trace.json"
    try:
        write_atomically(file, json.dumps(make_trace(directory)))
    except CannotWrite as error:
        raise UserError(str(error)) from error
    typer.echo(f"wrote {file}; open it at https://ui.perfetto.dev or in any trace-event viewer")


def make_trace(directory: RunDirectory) -> dict[str, object]:
    """Return the trace of all recorded events of the run, as the content of a JSON file for
    Perfetto.

    Raises:
        UserError: No event has a time.
    """
    trace, since = Trace(), None
    for path in record_files(directory.events).values():
        for exchange in read_record(path)[1]:
            if exchange.at is not None:
                since = exchange.at if since is None else since
                trace.take(exchange, exchange.at)
    if since is None:
        raise UserError(
            f"{directory.events} has no events with times; a trace requires "
            "telemetry.record_events true, and a run by this version"
        )
    trace.add_trainer(read_metrics(directory.metrics_file), since)
    return trace.finish()
