"""`megatron-async train`: check the settings, make or find the run, and run it to its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import typer

from megatron_async.checkpoint.manifest import first_intact, list_checkpoints, size_faults
from megatron_async.commands.report import show_closing
from megatron_async.commands.rollback import Rollback, rollback_to
from megatron_async.config import RunConfig
from megatron_async.config.load import differences
from megatron_async.errors import Terminated
from megatron_async.launcher.claim import claimed, new_run
from megatron_async.launcher.derived import Machine, derive
from megatron_async.launcher.devices import DeviceSplit, split_of_this_machine
from megatron_async.launcher.preflight import (
    Checked,
    check_one_machine,
    check_probe_tolerance,
    check_resume,
    check_run,
    check_store,
)
from megatron_async.launcher.supervisor import Supervisor
from megatron_async.run_directory import RunDirectory, RunOutcome
from megatron_async.telemetry.metrics import read_metrics


def start_run(config: RunConfig, what: str) -> RunDirectory:
    """A new run of `config` to its end; `what` started it. Raises UserError or ComponentFailure."""
    checked, devices = _checked(config, RunDirectory.of(config))
    show_notices(checked)
    with new_run(checked.config, what) as directory:
        _run(directory, checked.config, devices)
    show_closing(directory)
    return directory


def resume_command(run: Path, overrides: Sequence[str], from_step: int | None) -> None:
    """Go on with a run; `from_step`: from that kept checkpoint. Raises as `start_run`."""
    directory, before = RunDirectory.find(run, [], "--resume")
    _, settings = RunDirectory.find(run, list(overrides), "--resume")
    with ExitStack() as stack:
        stack.enter_context(claimed(directory, "megatron-async train --resume"))
        complete = directory.outcome() is RunOutcome.COMPLETE
        if complete and from_step is None and settings.steps <= before.steps:
            typer.echo(
                f"{directory.path.name} is complete after {before.steps} steps, nothing is "
                f"started: set steps to more, megatron-async train --resume {directory.path} "
                f"steps={2 * before.steps}"
            )
            return
        checked, devices = _checked(settings, directory)
        check_resume(directory, settings, from_step)
        back = None if from_step is None else rollback_to(directory, from_step)
        show_notices(checked)
        for line in resume_lines(directory, before, checked.config, back):
            typer.echo(line)
        directory.save_config(checked.config)
        for place in back.carry_out() if back is not None else ():
            typer.echo(f"set aside: {place}")
        _run(directory, checked.config, devices)
    show_closing(directory)


def _checked(config: RunConfig, directory: RunDirectory) -> tuple[Checked, DeviceSplit]:
    check_one_machine(config)
    derived = derive(config, Machine.here(config))
    checked = check_run(derived.config)
    checked = replace(checked, notices=(*derived.changes(), *checked.notices))
    check_probe_tolerance(checked.config)
    check_store(checked.config, directory)
    return checked, split_of_this_machine(checked.config)


def _run(directory: RunDirectory, config: RunConfig, devices: DeviceSplit) -> None:
    try:
        Supervisor(config, directory, devices).run()
    except (KeyboardInterrupt, Terminated):
        typer.echo(f"go on with: megatron-async train --resume {directory.path}", err=True)
        raise


def show_notices(checked: Checked) -> None:
    """Print the training data and the changed settings, before anything starts."""
    typer.echo(checked.summary)
    for notice in checked.notices:
        typer.echo(f"note: {notice}")


def resume_lines(
    directory: RunDirectory, before: RunConfig, after: RunConfig, back: Rollback | None
) -> list[str]:
    """Lines on where the run goes on, which steps it repeats, and what was changed."""
    kept = list_checkpoints(directory.checkpoints)
    newest = back.target if back else first_intact(kept, size_faults)
    start = 0 if newest is None else newest.step
    trained = read_metrics(directory.metrics_file)
    done = 1 + int(trained[-1]["step"]) if trained else 0
    what = "its beginning (there is no checkpoint yet)"
    if newest is not None:
        what = f"checkpoint {newest.path.name}, made after step {start - 1}"
    lines = [f"{directory.path.name} goes on from {what}"]
    if done > start:
        again = f"steps {start} to {done - 1} are" if done > start + 1 else f"step {start} is"
        lines.append(f"repeated: {again} trained again")
    return lines + [f"changed: {change}" for change in differences(before, after)]
