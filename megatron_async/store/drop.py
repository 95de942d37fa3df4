"""Provides `drop_group_of`, which drops a group from the store of a stopped run.

It implements `megatron-async trajectories RUN_DIR --drop ID`.

Invariants
- Only the rows of the group's trajectories change, all in one durable transaction. The rows of
  batches do not change. So a dropped trajectory is still shown as `batched` on a lineage that was
  trained on it.
- No other process writes to the store meanwhile, because the store's lock is held.
- The replica (the copy of the database in the run directory) is replaced too, so that a restore
  from the replica does not bring the dropped group back.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from megatron_async.errors import UserError
from megatron_async.store import schema as schema
from megatron_async.store.lineage import Consumption
from megatron_async.store.location import (
    has_store,
    lock_store,
    prepared_location,
    remove_replicated_database,
)
from megatron_async.store.reader import StoreContent, read_content
from megatron_async.store.recovery import checked, copy_database, fetch_database
from megatron_async.store.schema import DamagedStore, TrajectoryRow
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState


def drop_group_of(
    path: Path, trajectory_id: int, committed: PolicyVersion | None, directory: str = ""
) -> list[int]:
    """Drop all trajectories of the group of trajectory `trajectory_id`, with the reason `user`.

    Args:
        path: The store's name, RUN/trajectories.sqlite.
        trajectory_id: Any trajectory of the group.
        committed: The run's newest checkpoint. A trajectory that it was trained on cannot be
            dropped. None if the run has no checkpoint.
        directory: The setting `store.directory`.

    Returns:
        Ids of the trajectories that were dropped now, without those that had been dropped before.

    Raises:
        UserError: The store does not exist, is in use, is damaged or is on another node; or the
            trajectory is not in the store, was trained, or was dropped before.
    """
    if not has_store(path):
        raise UserError(f"trajectory store {path} does not exist")
    location = prepared_location(path, directory)
    with closing(lock_store(location.file)):
        try:
            unusable = fetch_database(location)
            if unusable is not None:
                raise DamagedStore(f"its database {unusable}")
            with checked(location.file) as connection:
                content = read_content(connection)
                rows = _droppable(content, trajectory_id, committed)
                _write(connection, rows)
            copy_database(location.file, location.replica)
            if location.is_external:
                # When a run whose database is outside its directory is stopped, only the replica is
                # kept, so that any node can resume the run. Keep to that.
                remove_replicated_database(location, content.tree.newest, content.position)
        except (DamagedStore, sqlite3.Error, OSError) as error:
            raise UserError(f"failed to change trajectory store {path}: {error}") from error
    return [row.trajectory_id for row in rows]


def _droppable(
    content: StoreContent, trajectory_id: int, committed: PolicyVersion | None
) -> list[TrajectoryRow]:
    """Return the rows of all trajectories in the group of `trajectory_id` that are not dropped yet.

    Raises:
        UserError: The trajectory is not in the store, is dropped, or was trained in a batch that
            checkpoint `committed` contains.
    """
    row = content.trajectories.get(trajectory_id)
    if row is None:
        raise UserError(
            f"--drop is {trajectory_id}, which is not a trajectory in the store of this run. "
            "Exported trajectories cannot be dropped: they have been trained or dropped already."
        )
    if row.drop_reason is not None:
        raise UserError(
            f"--drop is {trajectory_id}, a trajectory that has already been dropped "
            f"({row.drop_reason})"
        )
    if committed is not None and committed.lineage in content.tree:
        consumed = content.batched_steps(Consumption.at_checkpoint(content.tree, committed))
        if trajectory_id in consumed:
            raise UserError(
                f"--drop is {trajectory_id}, a trajectory that was trained in step "
                f"{consumed[trajectory_id]}, which checkpoint {committed} contains; it cannot be "
                "dropped any more"
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
    schema.write_rows(connection, TrajectoryRow, [schema.with_checksum(row) for row in dropped])
    connection.execute("COMMIT")
