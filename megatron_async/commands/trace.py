"""`megatron-async trace RUN_DIR`: the newest steps on a time axis, as a file for Perfetto."""

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
    """Write the file and print its path. Raises UserError."""
    directory, _ = RunDirectory.find(run, [])
    file = out or directory.path / "trace.json"
    try:
        write_atomically(file, json.dumps(make_trace(directory)))
    except CannotWrite as error:
        raise UserError(str(error)) from error
    typer.echo(f"{file}: open it at https://ui.perfetto.dev (or any viewer of trace-event JSON)")


def make_trace(directory: RunDirectory) -> dict[str, object]:
    """Trace every record that the run keeps. Raises UserError when none has times."""
    trace, since = Trace(), None
    for path in record_files(directory.events).values():
        for exchange in read_record(path)[1]:
            if exchange.at is not None:
                since = exchange.at if since is None else since
                trace.take(exchange, exchange.at)
    if since is None:
        raise UserError(
            f"{directory.events} holds no events with times: a trace needs telemetry.record_events "
            "true, and a run by this version"
        )
    trace.add_trainer(read_metrics(directory.metrics_file), since)
    return trace.finish()
