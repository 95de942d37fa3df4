"""Copies a store's database to the replica, and restores a missing or damaged database from it.

The replica is a copy of the database in the run directory, made at each checkpoint and at a stop.

Invariants
- Everything that is read is checked (by SQLite's `quick_check` and the CRC of each row). A damaged
  database and its log are not deleted: they are renamed with the suffix `.damaged-N`.
- The replica replaces a database that is damaged, missing, or on a node that cannot be reached.
  Data that the replica does not contain is lost, and a message names it; rollouts can be generated
  again.
- Losing data is preferred to training on it twice. Each checkpoint and each batch records the
  number of transactions that the store had (`position`). A store with fewer transactions may have
  lost the record of a trained batch, and so may a replica if that number is unknown. Then every
  group that is not known to be consumed is permanently excluded from training.
- Ids of lost groups are not used again.
- A copy has the content of its source at one moment, even if the source is written to meanwhile.
  The copy gets its final name only when it is complete and on disk.
- A replica is never modified. It is opened as immutable, which needs neither locks nor shared
  memory, so that it can be read on any file system from any node.
- Only one copy is made at a time, on a separate thread with a separate connection: commits do not
  wait for it. While a copy is still being written, the store stays locked.
"""

import asyncio
import contextlib
import logging
import secrets
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import force_to_disk, replace_durably
from megatron_async.files.lock import FileLock
from megatron_async.store import schema as schema
from megatron_async.store.documents import Counters
from megatron_async.store.lineage import Lineage
from megatron_async.store.location import (
    StoreLocation,
    StoreRecord,
    read_record,
    remove_replicated_database,
)
from megatron_async.store.reader import read_position, read_rows
from megatron_async.store.schema import DamagedStore
from megatron_async.store.writer import StoreWriter

logger = logging.getLogger(__name__)
_ID_GAP = 1_000_000  # Number of ids that are skipped when the used ids are not known.
_PAGES_AT_ONCE = 1024  # 8 MiB
_PART = ".part-"
T = TypeVar("T")


@dataclass(frozen=True)
class Recovery:
    """Recovery of a store whose database was damaged, missing or outdated when the store was
    opened.

    Attributes:
        message: Message for the user that names the damage, the replacement and the losses.
        damaged_file: New name of the damaged database; None if there was no file to keep.
        behind: Whether the opened store may lack transactions that the trainer has seen.
    """

    message: str
    damaged_file: Path | None
    behind: bool


@contextlib.contextmanager
def checked(path: Path) -> Iterator[sqlite3.Connection]:
    """Open the database `path` for the block, after checking the file's structure and format.

    A missing database is made, with empty tables. The CRCs of rows are not checked here.

    Raises:
        DamagedStore: The structure of the file is damaged.
        sqlite3.DatabaseError: SQLite cannot read the file.
        UserError: The file is not a trajectory store, or has another format.
    """
    if path.exists() and 0 < path.stat().st_size < schema.PAGE_BYTES:
        # SQLite would treat such a file as a new database.
        raise DamagedStore("the file ends within its first page")
    with closing(schema.connect(path)) as connection:
        schema.checked_format(connection, path)
        result = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if result != "ok":
            raise DamagedStore(" ".join(str(result).split()))
        schema.create_tables(connection)
        yield connection


def is_damage(error: Exception) -> bool:
    """Return whether `error` means that a database file has wrong content.

    Other errors, such as that of a locked file, say nothing about the content.
    """
    if isinstance(error, DamagedStore):
        return True
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or code in (
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    )


def fetch_database(location: StoreLocation) -> str | None:
    """Make the run's current database available at `location.file`, by a copy if it is elsewhere.

    It is copied from its old path if this node can open that, or else from the replica if a stop
    left the replica complete, with the number of transactions that store.json records. An outdated
    database at `location.file` is removed.

    Returns:
        None if the database is at `location.file` or the run is new. Otherwise the reason why it
        cannot be made available, as the end of a sentence about the database.

    Raises:
        OSError: A file cannot be copied or removed.
        sqlite3.Error: SQLite cannot copy the database.
    """
    file, record = location.file, read_record(location.run_file)
    # Without store.json, the run either is new or was started by an older version of this program.
    if record is None:
        if file.exists() or not (location.run_file.exists() or location.replica.exists()):
            return None
        record = StoreRecord(socket.gethostname(), None, 0)
    elif record.names(location) and file.exists():
        here = record.file is None or record.host == socket.gethostname()
        # If store.json names another node, the file at the same path on this node may be from
        # before the run moved to that node. It is current only if it has the newest lineage.
        if here or _as_far_as_readable(file, _newest_lineage) == record.lineage:
            return None
        logger.warning("removing %s, because the run has continued on another node since", file)
    schema.remove(file)
    database = record.database(location.run_file)
    if database != file and record.reachable(location.run_file):
        copy_database(database, file)
    elif record.closed_at is not None and record.closed_at == _as_far_as_readable(
        location.replica, read_position, immutable=True
    ):
        copy_database(location.replica, file, from_replica=True)
    elif record.host != socket.gethostname():
        return f"is {database} on host {record.host}, which this node cannot reach"
    else:
        return "no longer exists"
    return None


def restore(location: StoreLocation, copy: Path) -> bool:
    """Copy the replica of the store at `location` to the path `copy`, replacing any database there.

    Returns:
        False if there is no replica or it cannot be copied, else True.
    """
    try:
        schema.remove(copy)
        copy_database(location.replica, copy, from_replica=True)
    except FileNotFoundError:
        return False
    except (OSError, sqlite3.Error) as error:
        logger.warning("failed to copy replica %s: %s", location.replica, error)
        return False
    return True


def keep_damaged(file: Path) -> Path | None:
    """Rename the damaged database `file` and its log to an unused name with suffix `.damaged-N`.

    Returns:
        The new path of the database; None if there is no such file.
    """
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
    """Read the counters of used ids from the damaged database `file`, if they can be relied on.

    Returns:
        The counters; None if they cannot be read, or if the database has fewer transactions than
        `needed`, so that the counters are outdated.
    """

    def read(connection: sqlite3.Connection) -> Counters | None:
        return Counters.read(connection) if read_position(connection) >= needed else None

    return _as_far_as_readable(file, read)


def skip_used_ids(counters: Counters, known: Counters | None) -> None:
    """Advance the next ids in `counters` so that no id of the lost database is used again.

    Args:
        counters: Counters of the store that replaces the lost database; they are changed.
        known: Counters of the lost database. If they are None, `_ID_GAP` ids are skipped.
    """
    if known is None:
        counters.next_group += _ID_GAP
        counters.next_trajectory += _ID_GAP
    else:
        counters.next_group = max(counters.next_group, known.next_group)
        counters.next_trajectory = max(counters.next_trajectory, known.next_trajectory)


def _newest_lineage(connection: sqlite3.Connection) -> int | None:
    return max((one.lineage for one in read_rows(connection, Lineage)), default=None)


def _as_far_as_readable(
    file: Path, read: Callable[[sqlite3.Connection], T], *, immutable: bool = False
) -> T | None:
    """Open the database `file` and return the result of `read`; None if reading fails."""
    try:
        with closing(schema.connect(file, read_only=True, immutable=immutable)) as connection:
            return read(connection)
    except (sqlite3.Error, DamagedStore, ValueError):
        return None


# ---------------------------------------------------------------- the replica


def copy_database(source: Path, target: Path, *, from_replica: bool = False) -> None:
    """Copy the database `source` to `target` as of one moment, replacing `target` when complete.

    Partial copies that a killed process left next to `target` are removed.

    Args:
        source: Database to copy; other connections may write to it meanwhile.
        target: Path of the copy.
        from_replica: Whether `source` is a replica, which is opened as immutable.

    Raises:
        OSError: A file is missing or cannot be written.
        sqlite3.Error: SQLite cannot read or copy the database.
    """
    if not source.exists():
        raise FileNotFoundError(source)
    _remove_partial_copies(target)
    _copy(source, target, lambda: None, from_replica=from_replica)


def _copy(
    source: Path, target: Path, on_progress: Callable[[], None], *, from_replica: bool = False
) -> None:
    """Copy a database as `copy_database` does, and call `on_progress` after every 8 MiB.

    Partial copies of other processes are not removed.
    """
    part = target.with_name(f"{target.name}{_PART}{secrets.token_hex(4)}")

    def on_disk(status: int, remaining: int, total: int) -> None:
        # Force each 8 MiB to disk when it is copied. Otherwise the fsync at the end would have to
        # write the whole copy at once.
        force_to_disk(part)
        on_progress()

    # Open the copy without file locks. They are not needed, because no other process opens the file
    # yet, and its file system may not support them.
    unlocked = f"{part.absolute().as_uri()}?vfs=unix-none"
    try:
        # SQLite would make the file with mode 644 at most, even if the umask allows more.
        part.touch()
        with (
            closing(schema.connect(source, read_only=True, immutable=from_replica)) as connection,
            closing(sqlite3.connect(unlocked, uri=True, isolation_level=None)) as sink,
        ):
            sink.execute("PRAGMA journal_mode=OFF")
            sink.execute("PRAGMA synchronous=OFF")
            connection.execute("BEGIN")
            # SQLite takes its snapshot at the first read of a transaction, not at BEGIN.
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
            connection.backup(sink, pages=_PAGES_AT_ONCE, progress=on_disk)
        replace_durably(part, target)
    finally:
        part.unlink(missing_ok=True)


def _remove_partial_copies(target: Path) -> None:
    """Remove partial copies of `target` that a killed process left next to it.

    Call this only while the store is locked, so that no copy is in progress.
    """
    for part in target.parent.glob(f"{target.name}{_PART}*"):
        with contextlib.suppress(OSError):
            part.unlink()


class Replicator:
    """Copies the database of an open store to its replica, in the run directory, in the background.

    A copy that fails is logged as a warning, and the previous replica stays; the run does not end.
    """

    def __init__(self, location: StoreLocation, writer: StoreWriter, lineage: int) -> None:
        self._location, self._writer, self._lineage = location, writer, lineage
        self._task: asyncio.Task[bool] | None = None
        self._again = False
        self._complete_at: int | None = None
        self._lock: FileLock | None = None
        _remove_partial_copies(location.replica)

    def start(self) -> None:
        """Start copying the committed content of the database to the replica in the background.

        If a copy is already running, another one is made after it, since the running copy lacks
        later transactions.
        """
        if self._task is not None and not self._task.done():
            self._again = True
        else:
            self._task = asyncio.create_task(self._replicate())

    async def replicate_finally(self) -> None:
        """Copy the whole database to the replica, as the last copy before the writer is closed.

        Waits until everything written so far is committed and copied. Keeps the store locked until
        `leave`. If the writer has failed, no copy is made; closing the writer raises that error.
        """
        await self.finish()
        try:
            # Closing the writer releases its handle of the lock. This handle keeps the store locked
            # until `leave` has deleted the database.
            self._lock = self._writer.share_lock()
            position = await self._writer.wait(self._writer.barrier())
        except ComponentFailure:
            # The writer has failed. The error is not raised here, because closing the writer raises
            # it.
            return
        self.start()
        if await self.finish():
            self._complete_at = position

    def leave(self) -> None:
        """Delete the database if `replicate_finally` made a complete replica; release its lock.

        Call this after the writer is closed.

        Raises:
            OSError: The database cannot be deleted.
        """
        if self._lock is None:
            return
        with closing(self._lock):
            if self._complete_at is not None:
                remove_replicated_database(self._location, self._lineage, self._complete_at)

    async def finish(self) -> bool:
        """Wait for the running copy to the replica, if any; return whether that copy succeeded.

        Returns True if no copy is running.
        """
        task, self._task = self._task, None
        return True if task is None else await task

    async def _replicate(self) -> bool:
        good = self._again = True
        while self._again:
            self._again = False
            try:
                await self._copy()
                good = True
            except (OSError, sqlite3.Error, ComponentFailure) as error:
                good = False
                logger.warning(
                    "failed to write replica %s of the trajectory store; keeping the previous "
                    "replica: %s",
                    self._location.replica,
                    error,
                )
        return good

    async def _copy(self) -> None:
        progress, lock = threading.Event(), self._writer.share_lock()

        def work() -> None:
            with closing(lock):
                _copy(self._location.file, self._location.replica, progress.set)

        done = asyncio.ensure_future(asyncio.to_thread(work))
        limit = self._writer.stall_seconds
        progress.set()
        while not done.done():
            if not progress.is_set():
                raise ComponentFailure(f"the copy made no progress for {limit:g} s")
            progress.clear()
            await asyncio.wait({done}, timeout=limit)
        await done
