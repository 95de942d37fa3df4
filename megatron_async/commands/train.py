"""`megatron-async train`: check the settings, make or find the run, and run it to its end."""

import os
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import typer

from megatron_async.checkpoint.manifest import (
    first_intact,
    list_checkpoints,
    quick_faults,
    quickly_read,
)
from megatron_async.commands.report import show_closing
from megatron_async.commands.rollback import Rollback, rollback_to
from megatron_async.config import RunConfig
from megatron_async.config.load import differences
from megatron_async.errors import Terminated, UserError
from megatron_async.launcher.derived import Machine, check_memory, derive
from megatron_async.launcher.devices import DeviceSplit, split_of_this_machine
from megatron_async.launcher.environment import allocator_notices
from megatron_async.launcher.estimates import checkpoints_with_room, estimate_lines
from megatron_async.launcher.preflight import (
    PreflightResult,
    check_one_machine,
    check_probe_tolerance,
    check_resume,
    check_run,
    check_same_run,
    check_store,
)
from megatron_async.launcher.run_lock import check_new, check_unclaimed, hold_run_lock, new_run
from megatron_async.launcher.supervisor import supervise
from megatron_async.run_directory import RunDirectory, RunOutcome
from megatron_async.runtime.garbage_collection import gc_disabled
from megatron_async.telemetry.metrics import read_metrics

_PASSED: Final = "all checks have passed, also of the reward; nothing was started"


def start_run(config: RunConfig, what: str) -> RunDirectory:
    """A new run of `config` to its end; `what` started it. Raises UserError or ComponentFailure."""
    checked, devices = _checked(config, RunDirectory.of(config))
    show_notices(checked)
    with new_run(checked.config, what) as directory:
        _run(directory, checked.config, devices)
    show_closing(directory)
    return directory


def dry_run(config: RunConfig) -> None:
    """Print what a start of `config` would use here and what its checks find; make nothing.

    Raises UserError where a start would, after the layout.
    """
    show_layout(config)
    directory = RunDirectory.of(config)
    show_notices(_checked(config, directory)[0])
    check_new(directory)
    typer.echo(_PASSED)


def resume_command(
    run: Path, overrides: Sequence[str], from_step: int | None, *, dry: bool = False
) -> None:
    """Go on with a run; `from_step`: from that kept checkpoint. Raises as `start_run`.

    `dry`: print what would be done, and change nothing.
    """
    directory, before = RunDirectory.find(run, [], "--resume")
    _, settings = RunDirectory.find(run, list(overrides), "--resume")
    with nullcontext() if dry else hold_run_lock(directory, "megatron-async train --resume"):
        if from_step is None and (message := complete(directory, before, settings)):
            typer.echo(message)
            return
        if dry:
            check_unclaimed(directory)
            show_layout(settings)
        checked, devices = _checked(settings, directory)
        check_resume(directory, settings, from_step)
        changed = check_same_run(directory, before, settings)
        checked = replace(checked, notices=(*checked.notices, *changed))
        back = None if from_step is None else rollback_to(directory, from_step)
        show_notices(checked)
        for line in resume_lines(directory, before, checked.config, back):
            typer.echo(line)
        if dry:
            typer.echo(_PASSED)
            return
        with _prepared(directory, checked.config, back):
            again = [] if from_step is None else [f"--from-step={from_step}"]
            _run(directory, checked.config, devices, [*again, *overrides])
    show_closing(directory)


def complete(directory: RunDirectory, before: RunConfig, settings: RunConfig) -> str:
    """A sentence where the run has trained all its steps and `settings` ask for no more."""
    if directory.outcome() is not RunOutcome.COMPLETE or settings.steps > before.steps:
        return ""
    return (
        f"{directory.path.name} is complete after {before.steps} steps, nothing is started: set "
        f"steps to more, as by --resume {directory.path} steps={2 * before.steps}"
    )


@contextmanager
def _prepared(directory: RunDirectory, config: RunConfig, back: Rollback | None) -> Iterator[None]:
    """Settings and checkpoints as a resume wants them; where it does not begin, as they were."""
    directory.prepare_resume(config)
    try:
        for place in back.carry_out() if back is not None else ():
            typer.echo(f"set aside: {place}")
        yield
    finally:
        if directory.resume_file.exists():
            if back is not None:
                back.undo()
            directory.resume_file.unlink()


def _checked(config: RunConfig, directory: RunDirectory) -> tuple[PreflightResult, DeviceSplit]:
    check_one_machine(config)
    machine = Machine.here(config)
    derived = derive(config, machine)
    with gc_disabled():  # the packages of tasks and tokenizers
        checked = check_run(derived.config)
    notices = allocator_notices(derived.config, machine.device, os.environ)
    checked = replace(checked, notices=(*derived.changes(), *notices, *checked.notices))
    check_probe_tolerance(checked.config)
    check_memory(checked.config, machine)
    checkpoints_with_room(checked.config, directory)
    check_store(checked.config, directory)
    return checked, split_of_this_machine(checked.config)


def _run(
    directory: RunDirectory, config: RunConfig, devices: DeviceSplit, asked: Sequence[str] = ()
) -> None:
    """`asked`: what a resume has changed, which the run has once it has begun."""
    try:
        supervise(config, directory, devices)
    except (KeyboardInterrupt, Terminated):
        again = ["--resume", str(directory.path)]
        again += asked if directory.resume_file.exists() else ()
        typer.echo(f"go on with: megatron-async train {shlex.join(again)}", err=True)
        raise


def show(line: str) -> None:
    """Print a line in at most 80 columns; paths and options stay whole."""
    whole = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    typer.echo(whole(line, 80, subsequent_indent=indent))


def show_layout(config: RunConfig) -> None:
    """Print layout, memory and derived settings of a run on this machine."""
    machine = Machine.here(config)
    derived = derive(config, machine)
    show(f"{config.name} on {machine.title}:")
    for line in (*estimate_lines(derived.config, machine), *derived.lines()):
        show(f"  {line}")
    typer.echo("checks before a start:")


def show_notices(checked: PreflightResult) -> None:
    """Print the training data and the changed settings, before anything starts."""
    typer.echo(checked.summary)
    for notice in checked.notices:
        typer.echo(f"note: {notice}")


def resume_lines(
    directory: RunDirectory, before: RunConfig, after: RunConfig, back: Rollback | None
) -> list[str]:
    """Lines on where the run goes on, which steps it repeats, and what was changed."""
    kept = list_checkpoints(directory.checkpoints)
    newest = back.target if back else first_intact(kept, quick_faults)
    if kept and newest is None:
        raise UserError(f"all in {directory.checkpoints} are damaged: restore one, or start anew")
    start = 0 if newest is None else newest.step
    trained = read_metrics(directory.metrics_file)
    done = 1 + int(trained[-1]["step"]) if trained else 0
    what = "its beginning (there is no checkpoint yet)"
    if newest is not None:
        what = f"checkpoint {newest.path.name}, made after step {start - 1}"
        if back is None and not quickly_read(newest):
            what += " (its files are verified as they are read)"
    lines = [f"{directory.path.name} goes on from {what}"]
    if done > start:
        again = f"steps {start} to {done - 1} are" if done > start + 1 else f"step {start} is"
        lines.append(f"repeated: {again} trained again")
    return lines + [f"changed: {change}" for change in differences(before, after)]
