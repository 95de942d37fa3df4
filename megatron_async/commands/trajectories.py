"""`megatron-async trajectories`: list the trajectories of a run, print one, drop a group."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import typer
from rich.console import Console

from megatron_async.checkpoint.manifest import list_checkpoints
from megatron_async.errors import UserError
from megatron_async.launcher.claim import claimed
from megatron_async.run_directory import RunDirectory
from megatron_async.store import exported as exported_store
from megatron_async.store.drop import drop_group_of
from megatron_async.store.reader import StoreReader
from megatron_async.store.view import details, listing
from megatron_async.tasks.text_task import load_tokenizer
from megatron_async.trajectory.types import TrajectoryState


def list_command(run: Path, state: str | None, limit: int, with_exported: bool) -> None:
    """A table, newest last. Raises UserError."""
    directory, _ = RunDirectory.find(run, [])
    if state is not None and state not in set(TrajectoryState):
        raise UserError(f"--state is {state!r}; it must be one of {', '.join(TrajectoryState)}")
    wanted = None if state is None else TrajectoryState(state)
    console = Console(soft_wrap=True)
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        older = exported_store.summaries(reader) if with_exported else []
        # Its ids are older than most of the store's, but not than all of them.
        listed = sorted([*older, *reader.summaries()], key=lambda s: s.trajectory_id)
        console.print(listing(listed, state=wanted, limit=limit or None))
        if reader.note:
            console.print(reader.note, markup=False, highlight=False)
        missing = "" if with_exported else exported_store.missing_line(reader)
        if missing:
            console.print(missing, markup=False, highlight=False)


def show_command(run: Path, trajectory_id: int) -> None:
    """Print a trajectory, exported or not: prompt, segments with versions, reward. UserError."""
    directory, settings = RunDirectory.find(run, [])
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        found = exported_store.find(reader, trajectory_id)
        tokenizer = load_tokenizer(settings.model.path)
        Console(soft_wrap=True).print(details(found, lambda ids: tokenizer.decode(list(ids))))


def drop_command(run: Path, trajectory_id: int) -> None:
    """Take it out of a run that has stopped, with its group, for good. Raises UserError."""
    directory, settings = RunDirectory.find(run, [])
    with claimed(directory, "trajectories --drop"):
        newest = next(iter(list_checkpoints(directory.checkpoints)), None)
        committed = None if newest is None else newest.manifest.version
        gone = drop_group_of(
            directory.store_file, trajectory_id, committed, settings.store.directory
        )
    typer.echo(f"dropped (user), with its group: {', '.join(map(str, gone))}")
