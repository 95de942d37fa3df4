"""Taking a group out of the store of a run that has stopped (`trajectories --drop`).

Invariants
- Only the rows of the group's trajectories change, all in one durable transaction. Which batches
  are consumed is not touched: a trajectory that a surviving lineage has trained stays `batched`
  there.
- Nobody else writes meanwhile: the store's lock is held.
- The replica has it too, so that a group which was dropped does not come back from there.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from megatron_async.errors import UserError
from megatron_async.store import schema as schema
from megatron_async.store.lineage import Consumption
from megatron_async.store.location import has_store, leave, lock_store, prepared_location
from megatron_async.store.reader import StoreContent, read_content
from megatron_async.store.recovery import checked, copy_database, fetch_database
from megatron_async.store.schema import DamagedStore, TrajectoryRow
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState


def drop_group_of(
    path: Path, trajectory_id: int, committed: PolicyVersion | None, directory: str = ""
) -> list[int]:
    """Drop the group of this trajectory as `user`; returns the trajectories that were dropped.

    `path` is RUN/trajectories.sqlite, `directory` is `store.directory`; `committed` the newest
    checkpoint, whose batches are trained for good. Raises UserError when the store is in use,
    damaged or on another node, and when the trajectory is not there, trained or dropped.
    """
    if not has_store(path):
        raise UserError(f"there is no trajectory store {path}")
    location = prepared_location(path, directory)
    with closing(lock_store(location.file)):
        try:
            unusable = fetch_database(location)
            if unusable is not None:
                raise DamagedStore(f"it {unusable}")
            with checked(location.file) as connection:
                content = read_content(connection)
                rows = _droppable(content, trajectory_id, committed)
                _write(connection, rows)
            copy_database(location.file, location.replica)
            if location.is_external:  # as a stop leaves it
                leave(location, content.tree.newest, content.position)
        except (DamagedStore, sqlite3.Error, OSError) as error:
            raise UserError(f"trajectory store {path} cannot be changed: {error}") from error
    return [row.trajectory_id for row in rows]


def _droppable(
    content: StoreContent, trajectory_id: int, committed: PolicyVersion | None
) -> list[TrajectoryRow]:
    """The rows of its group that are not dropped yet."""
    row = content.trajectories.get(trajectory_id)
    if row is None:
        raise UserError(
            f"--drop is {trajectory_id}, and the run has no such trajectory (one that was exported "
            "has been trained or dropped)"
        )
    if row.drop_reason is not None:
        raise UserError(
            f"--drop is {trajectory_id}, which has been dropped already ({row.drop_reason})"
        )
    if committed is not None and committed.lineage in content.tree:
        consumed = content.batched_steps(Consumption.at_checkpoint(content.tree, committed))
        if trajectory_id in consumed:
            raise UserError(
                f"--drop is {trajectory_id}, which was trained in step {consumed[trajectory_id]}; "
                f"checkpoint {committed} holds that"
            )
    members = content.groups[row.group_id].trajectory_ids
    return [content.trajectories[i] for i in members if content.trajectories[i].drop_reason is None]


def _write(connection: sqlite3.Connection, rows: list[TrajectoryRow]) -> None:
    dropped = [
        row._replace(
            revision=row.revision + 1,
            state=TrajectoryState.DROPPED.value,
            drop_reason=DropReason.USER.value,
        )
        for row in rows
    ]
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("BEGIN IMMEDIATE")
    schema.write_rows(connection, TrajectoryRow, [schema.sealed(row) for row in dropped])
    connection.execute("COMMIT")
