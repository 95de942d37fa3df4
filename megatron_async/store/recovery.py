"""Replica of a store's database, and opening one: checked, brought here, or replaced by it.

Invariants
- Everything that is read is checked (SQLite's `quick_check`, the CRC of each row). What is damaged
  keeps its bytes under its name with `.damaged-N`, and so does its log.
- The replica takes the place of a database that is damaged, gone or on a node that cannot be
  reached. What it does not hold is lost, and is named; rollouts can be generated again.
- Losing data is preferred to training it twice: when transactions are missing that the run has
  seen (`position`), every group that is not known to be consumed is set aside, never trained again.
- Ids of lost groups are not given out again.
- A copy is one moment of its source, whatever is written meanwhile; it has its name only when it is
  complete and on disk.
- A replica never changes: it is opened as immutable, which takes neither locks nor shared memory,
  so that it can be read on any file system from any node.
- One copy at a time, on a thread and a connection of its own: commits do not wait for it. A copy
  that is still being written keeps the store locked.
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
from megatron_async.store.location import Record, StoreLocation, leave, read_record
from megatron_async.store.reader import read_position, read_rows
from megatron_async.store.schema import DamagedStore
from megatron_async.store.writer import StoreWriter

logger = logging.getLogger(__name__)
_ID_GAP = 1_000_000  # ids left out when it is not known which have been given
_PAGES_AT_ONCE = 1024  # 8 MiB
_PART = ".part-"
T = TypeVar("T")


@dataclass(frozen=True)
class Recovery:
    """Damage that was found and what became of it; `sentence` is for a person.

    `behind`: what was found may be an older state than the run has seen.
    """

    sentence: str
    damaged_file: Path | None
    behind: bool


@contextlib.contextmanager
def checked(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a file (made if there is none) whose structure is sound.

    Raises DamagedStore or sqlite3.DatabaseError for a damaged file, UserError for a foreign one.
    """
    if path.exists() and 0 < path.stat().st_size < schema.PAGE_BYTES:
        raise DamagedStore("it ends within its first page")  # SQLite would take it for a new one
    with closing(schema.connect(path)) as connection:
        schema.checked_format(connection, path)
        result = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if result != "ok":
            raise DamagedStore(" ".join(str(result).split()))
        schema.create_tables(connection)
        yield connection


def is_damage(error: Exception) -> bool:
    """Return whether the error means wrong content (and not, for one, that the file is locked)."""
    if isinstance(error, DamagedStore):
        return True
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or code in (
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    )


def fetch_database(location: StoreLocation) -> str | None:
    """Put the run's database where `place` has it, if it was elsewhere.

    Returns what keeps it from being used, as the end of a sentence; None when it is there, or the
    run is new. Raises OSError, sqlite3.Error.
    """
    file, record = location.file, read_record(location.run_file)
    if record is None:  # a new run, or one of a version without the record
        if file.exists() or not (location.run_file.exists() or location.replica.exists()):
            return None
        record = Record(socket.gethostname(), None, 0)
    elif record.names(location) and file.exists():
        here = record.file is None or record.host == socket.gethostname()
        # Another node may have a file of that name, from before the run went on elsewhere.
        if here or _as_far_as_readable(file, _newest_lineage) == record.lineage:
            return None
        logger.warning("removing %s: the run has gone on elsewhere since", file)
    schema.remove(file)
    database = record.database(location.run_file)
    if database != file and record.reachable(location.run_file):
        copy_database(database, file)
    elif record.closed_at is not None and record.closed_at == _as_far_as_readable(
        location.replica, read_position, immutable=True
    ):
        copy_database(location.replica, file, from_replica=True)
    elif record.host != socket.gethostname():
        return f"is {database} on {record.host}, which this node does not reach"
    else:
        return "is not there any more"
    return None


def restore(location: StoreLocation, copy: Path) -> bool:
    """Copy the replica; False where there is none that can be read."""
    try:
        schema.remove(copy)
        copy_database(location.replica, copy, from_replica=True)
    except FileNotFoundError:
        return False
    except (OSError, sqlite3.Error) as error:
        logger.warning("replica %s cannot be read: %s", location.replica, error)
        return False
    return True


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

    def read(connection: sqlite3.Connection) -> Counters | None:
        return Counters.read(connection) if read_position(connection) >= needed else None

    return _as_far_as_readable(file, read)


def skip_used_ids(counters: Counters, known: Counters | None) -> None:
    """Ids that `known` has given, or may have been given, are not given again."""
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
    """Return what `read` finds in the file; None where it is damaged or cannot be opened."""
    try:
        with closing(schema.connect(file, read_only=True, immutable=immutable)) as connection:
            return read(connection)
    except (sqlite3.Error, DamagedStore, ValueError):
        return None


# ---------------------------------------------------------------- the replica


def copy_database(source: Path, target: Path, *, from_replica: bool = False) -> None:
    """Raises OSError, sqlite3.Error."""
    if not source.exists():
        raise FileNotFoundError(source)
    _remove_parts(target)
    _copy(source, target, lambda: None, from_replica=from_replica)


def _copy(
    source: Path, target: Path, come_on: Callable[[], None], *, from_replica: bool = False
) -> None:
    """`come_on` is called after each part. Raises OSError, sqlite3.Error."""
    part = target.with_name(f"{target.name}{_PART}{secrets.token_hex(4)}")

    def on_disk(status: int, remaining: int, total: int) -> None:
        force_to_disk(part)  # else the last one would force all of it at once
        come_on()

    # No locks: nobody else opens the file yet, and its file system may have none.
    writing = f"{part.absolute().as_uri()}?vfs=unix-none"
    try:
        part.touch()  # SQLite would make it with mode 644 at most, whatever umask allows.
        with (
            closing(schema.connect(source, read_only=True, immutable=from_replica)) as connection,
            closing(sqlite3.connect(writing, uri=True, isolation_level=None)) as sink,
        ):
            sink.execute("PRAGMA journal_mode=OFF")
            sink.execute("PRAGMA synchronous=OFF")
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # the moment
            connection.backup(sink, pages=_PAGES_AT_ONCE, progress=on_disk)
        replace_durably(part, target)
    finally:
        part.unlink(missing_ok=True)


def _remove_parts(target: Path) -> None:
    """Remove what a killed process had copied. The store is locked: no copy is under way."""
    for part in target.parent.glob(f"{target.name}{_PART}*"):
        with contextlib.suppress(OSError):
            part.unlink()


class Replicator:
    """Keeps the replica of an open store. One that fails is reported, and costs no run."""

    def __init__(self, location: StoreLocation, writer: StoreWriter, lineage: int) -> None:
        self._location, self._writer, self._lineage = location, writer, lineage
        self._task: asyncio.Task[bool] | None = None
        self._again = False
        self._complete_at: int | None = None
        self._lock: FileLock | None = None
        _remove_parts(location.replica)

    def start(self) -> None:
        """Begin a copy of what is committed, or another one after the one that runs."""
        if self._task is not None and not self._task.done():
            self._again = True
        else:
            self._task = asyncio.create_task(self._replicate())

    async def last(self) -> None:
        """Copy all that the database has to the replica, before the writer ends."""
        await self.finish()
        try:
            self._lock = self._writer.share_lock()  # until `leave` has removed the database
            position = await self._writer.wait(self._writer.barrier())
        except ComponentFailure:  # it is raised where the writer is closed
            return
        self.start()
        if await self.finish():
            self._complete_at = position

    def leave(self) -> None:
        """Remove the database that the replica holds whole, after the writer. Raises OSError."""
        if self._lock is None:
            return
        with closing(self._lock):
            if self._complete_at is not None:
                leave(self._location, self._lineage, self._complete_at)

    async def finish(self) -> bool:
        """Wait for the copy that runs, if any; False when it has failed."""
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
                    "replica %s of the trajectory store cannot be written, the one before it "
                    "stays: %s",
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
                raise ComponentFailure(f"nothing was written for {limit:g} s")
            progress.clear()
            await asyncio.wait({done}, timeout=limit)
        await done
