"""Opening a store's database: checked, brought here from elsewhere, or replaced by its replica.

Invariants
- Everything that is read is checked (SQLite's `quick_check`, the CRC of each row). What is damaged
  keeps its bytes under its name with `.damaged-N`, and so does its log.
- The replica takes the place of a database that is damaged, gone or on a node that cannot be
  reached. What it does not hold is lost, and is named; rollouts can be generated again.
- At most once comes before nothing lost: when transactions are missing that the run has seen
  (`position`), every group that is not known to be consumed is set aside, never trained again.
- Ids of lost groups are not given out again.
"""

from __future__ import annotations

import logging
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from megatron_async.disk import replace_durably
from megatron_async.store import schema as schema
from megatron_async.store.place import Record, StorePlace, read_record
from megatron_async.store.reader import (
    Counters,
    StoreContent,
    read_chunks,
    read_content,
    read_counters,
    read_position,
    read_rows,
)
from megatron_async.store.replica import copy_database
from megatron_async.store.schema import ChunkRow, DamagedStore

logger = logging.getLogger(__name__)
_ID_GAP = 1_000_000  # ids left out when it is not known which have been given


@dataclass(frozen=True)
class Recovery:
    """Damage that was found and what became of it; `sentence` is for a person.

    `behind`: what was found may be an older state than the run has seen.
    """

    sentence: str
    damaged_file: Path | None
    behind: bool
    lost_trajectories: int
    set_aside_trajectories: int = 0


def read_store(path: Path) -> StoreContent:
    """Check the file (made if there is none) and read all but tokens.

    Raises DamagedStore or sqlite3.DatabaseError for a damaged file, UserError for a foreign one.
    """
    if path.exists() and 0 < path.stat().st_size < schema.PAGE_BYTES:
        raise DamagedStore("it ends within its first page")  # SQLite would take it for a new one
    with closing(schema.connect(path)) as connection:
        schema.check_identity(connection, path)
        result = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if result != "ok":
            raise DamagedStore(" ".join(str(result).split()))
        schema.bring_up_to_date(connection)
        schema.create_tables(connection)
        return read_content(connection)


def read_tokens(path: Path, trajectory_ids: Sequence[int]) -> Mapping[int, list[ChunkRow]]:
    """Chunks of these trajectories. Raises DamagedStore or sqlite3.DatabaseError."""
    with closing(schema.connect(path)) as connection:
        return read_chunks(connection, trajectory_ids)


def is_damage(error: Exception) -> bool:
    """Return whether the error means wrong content (and not, for one, that the file is locked)."""
    if isinstance(error, DamagedStore):
        return True
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or code in (
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    )


def bring_here(place: StorePlace) -> str | None:
    """Put the run's database where `place` has it, if it was elsewhere.

    Returns what keeps it from being used, as the end of a sentence; None when it is there, or the
    run is new. Raises OSError, sqlite3.Error.
    """
    file, record = place.file, read_record(place.run_file)
    if record is None:  # a new run, or one of a version without the record
        if file.exists() or not (place.run_file.exists() or place.replica.exists()):
            return None
        record = Record(socket.gethostname(), None, 0)
    elif record.names(place) and file.exists():
        here = record.file is None or record.host == socket.gethostname()
        # Another node may have a file of that name, from before the run went on elsewhere.
        if here or _newest_lineage(file) == record.lineage:
            return None
        logger.warning("removing %s: the run has gone on elsewhere since", file)
    for stale in schema.files_of(file):
        stale.unlink(missing_ok=True)
    database = record.database(place.run_file)
    if database != file and record.reachable(place.run_file):
        copy_database(database, file)
    elif record.closed_at is not None and _position(place.replica) == record.closed_at:
        copy_database(place.replica, file, from_replica=True)
    elif record.host != socket.gethostname():
        return f"is {database} on {record.host}, which this node does not reach"
    else:
        return "is not there any more"
    return None


def restored(place: StorePlace) -> Path | None:
    """A copy of the replica beside the database, if there is a replica that can be read."""
    candidate = place.file.with_name(place.file.name + ".restored")
    try:
        for leftover in schema.files_of(candidate):
            leftover.unlink(missing_ok=True)
        copy_database(place.replica, candidate, from_replica=True)
    except FileNotFoundError:
        return None
    except (OSError, sqlite3.Error) as error:
        logger.warning("replica %s cannot be read: %s", place.replica, error)
        return None
    return candidate


def put_in_place(copy: Path, file: Path) -> None:
    """A database that was copied and closed gets its name. Durable."""
    replace_durably(copy, file)


def set_aside(file: Path) -> Path | None:
    """Give a database and its log a name of their own; returns it, None if there is no file."""
    number = 1
    while (target := file.with_name(f"{file.name}.damaged-{number}")).exists():
        number += 1
    data, log, memory = schema.files_of(file)
    memory.unlink(missing_ok=True)
    if log.exists():
        log.rename(schema.files_of(target)[1])
    if not data.exists():
        return None
    data.rename(target)
    return target


def counters_of(file: Path, needed: int) -> Counters | None:
    """Read from a damaged database which ids it has given; None: nothing to rely on.

    It must have got as far as transaction `needed`.
    """
    try:
        with closing(schema.connect(file, read_only=True)) as connection:
            return read_counters(connection) if read_position(connection) >= needed else None
    except (sqlite3.Error, DamagedStore, ValueError):
        return None


def continue_ids(counters: Counters, known: Counters | None) -> None:
    """Ids that `known` has given, or may have been given, are not given again."""
    if known is None:
        counters.next_group += _ID_GAP
        counters.next_trajectory += _ID_GAP
    else:
        counters.next_group = max(counters.next_group, known.next_group)
        counters.next_trajectory = max(counters.next_trajectory, known.next_trajectory)


def _newest_lineage(file: Path) -> int | None:
    try:
        with closing(schema.connect(file, read_only=True)) as connection:
            lines = read_rows(connection, "lines")
            return max((int(str(row[0])) for row in lines), default=None)
    except (sqlite3.Error, DamagedStore):
        return None


def _position(replica: Path) -> int | None:
    try:
        with closing(schema.connect(replica, read_only=True, immutable=True)) as connection:
            return read_position(connection)
    except (sqlite3.Error, DamagedStore):
        return None
