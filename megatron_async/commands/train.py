"""`megatron-async train`: checks the settings, creates or finds the run, and runs it to its end."""

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
    is_quickly_readable,
    list_checkpoints,
    quick_faults,
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

_PASSED: Final = "all checks passed, including those of the reward; nothing was started"


def start_run(config: RunConfig, what: str) -> RunDirectory:
    """Create a new run of `config` and run it to its end; return its directory.

    `what` is the command that started the run, stored in the run's lock.

    Raises:
        UserError: Bad input.
        ComponentFailure: A component of the run failed.
    """
    checked, devices = _checked(config, RunDirectory.of(config))
    show_notices(checked)
    with new_run(checked.config, what) as directory:
        _run(directory, checked.config, devices)
    show_closing(directory)
    return directory


def dry_run(config: RunConfig) -> None:
    """Print the settings that a start of `config` would use on this machine and the findings of its
    checks; create nothing.

    Raises:
        UserError: A start would be refused; raised after the layout is printed.
    """
    show_layout(config)
    directory = RunDirectory.of(config)
    show_notices(_checked(config, directory)[0])
    check_new(directory)
    typer.echo(_PASSED)


def resume_command(
    run: Path, overrides: Sequence[str], from_step: int | None, *, dry: bool = False
) -> None:
    """Resume a run from its newest checkpoint, or with `from_step` from the checkpoint of that
    step.

    Args:
        run: The run directory.
        overrides: Settings to change.
        from_step: Step of an older checkpoint; None for the newest.
        dry: Whether to only print what would be done.

    Raises:
        UserError: Bad input.
        ComponentFailure: A component of the run failed.
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
            step = [] if from_step is None else [f"--from-step={from_step}"]
            _run(directory, checked.config, devices, [*step, *overrides])
    show_closing(directory)


def complete(directory: RunDirectory, before: RunConfig, settings: RunConfig) -> str:
    """Return a message if a resume has nothing to do, because the run has trained all its steps and
    `settings` do not raise their number; otherwise return an empty string.

    Args:
        directory: The run directory.
        before: Settings of the run so far.
        settings: Settings of the resume.
    """
    if directory.outcome() is not RunOutcome.COMPLETE or settings.steps > before.steps:
        return ""
    return (
        f"{directory.path.name} is complete after {before.steps} steps; nothing was started. To "
        f"train more steps: --resume {directory.path} steps={2 * before.steps}"
    )


@contextmanager
def _prepared(directory: RunDirectory, config: RunConfig, back: Rollback | None) -> Iterator[None]:
    """Store the settings of a resume and rename checkpoints before the block. After the block, undo
    both if the resume has not started.

    Args:
        directory: The run directory.
        config: Settings of the resume.
        back: The rollback to carry out; None for none.
    """
    directory.prepare_resume(config)
    try:
        for path in back.carry_out() if back is not None else ():
            typer.echo(f"renamed: {path}")
        yield
    finally:
        if directory.resume_file.exists():
            if back is not None:
                back.undo()
            directory.resume_file.unlink()


def _checked(config: RunConfig, directory: RunDirectory) -> tuple[PreflightResult, DeviceSplit]:
    """Derive settings from this machine and check the run; return the checked settings and the
    division of this machine's GPUs."""
    check_one_machine(config)
    machine = Machine.here(config)
    derived = derive(config, machine)
    # The checks import large packages, which is faster without garbage collection.
    with gc_disabled():
        checked = check_run(derived.config)
    notices = allocator_notices(derived.config, machine.device, os.environ)
    checked = replace(checked, notices=(*derived.changes(), *notices, *checked.notices))
    check_probe_tolerance(checked.config)
    check_memory(checked.config, machine)
    checkpoints_with_room(checked.config, directory)
    check_store(checked.config, directory)
    return checked, split_of_this_machine(checked.config)


def _run(
    directory: RunDirectory, config: RunConfig, devices: DeviceSplit, arguments: Sequence[str] = ()
) -> None:
    """Run the training; if it is interrupted, print the command that resumes it.

    `arguments` are the user's further arguments of a resume. The printed command repeats them if
    the resume had not started, because they were then not stored.
    """
    try:
        supervise(config, directory, devices)
    except (KeyboardInterrupt, Terminated):
        command = ["--resume", str(directory.path)]
        command += arguments if directory.resume_file.exists() else ()
        typer.echo(f"resume with: megatron-async train {shlex.join(command)}", err=True)
        raise


def show(line: str) -> None:
    """Print a line wrapped at 80 columns; long words such as paths are not broken."""
    wrap = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    typer.echo(wrap(line, 80, subsequent_indent=indent))


def show_layout(config: RunConfig) -> None:
    """Print layout, memory and derived settings of a run on this machine."""
    machine = Machine.here(config)
    derived = derive(config, machine)
    show(f"{config.name} on {machine.title}:")
    for line in (*estimate_lines(derived.config, machine), *derived.lines()):
        show(f"  {line}")
    typer.echo("checks before a start:")


def show_notices(checked: PreflightResult) -> None:
    """Print the description of the training data and the notices of the checks."""
    typer.echo(checked.summary)
    for notice in checked.notices:
        typer.echo(f"note: {notice}")


def resume_lines(
    directory: RunDirectory, before: RunConfig, after: RunConfig, back: Rollback | None
) -> list[str]:
    """Return lines that say at which step the run resumes, which steps it repeats, and which
    settings have changed.

    Raises:
        UserError: All checkpoints are damaged.
    """
    kept = list_checkpoints(directory.checkpoints)
    newest = back.target if back else first_intact(kept, quick_faults)
    if kept and newest is None:
        raise UserError(
            f"all checkpoints in {directory.checkpoints} are damaged. Restore one of them, or "
            "start a new run."
        )
    start = 0 if newest is None else newest.step
    trained = read_metrics(directory.metrics_file)
    done = 1 + int(trained[-1]["step"]) if trained else 0
    origin = "step 0 (there is no checkpoint yet)"
    if newest is not None:
        origin = f"checkpoint {newest.path.name}, made after step {start - 1}"
        if back is None and not is_quickly_readable(newest):
            origin += " (its files are verified as they are read)"
    lines = [f"{directory.path.name} resumes from {origin}"]
    if done > start:
        repeated = f"steps {start} to {done - 1}" if done > start + 1 else f"step {start}"
        lines.append(f"repeated: {repeated}")
    return lines + [f"changed: {change}" for change in differences(before, after)]
