"""Determines where a run's store keeps its database, and locks the database for one writer.

The database is on a disk of the rollout manager's node. Processes of other nodes read the replica,
a copy of the database.

    RUN/trajectories.sqlite            the database, if the run directory is on a local disk
    DIR/NAME-HASH/trajectories.sqlite  the database otherwise, below `store.directory` or TMPDIR
    RUN/trajectories.replica.sqlite    the replica: never modified, but replaced at checkpoints
    RUN/store.json                     the node and the path of the current database

Invariants
- The database is not on a file system that is known to be shared between nodes, because SQLite's
  write-ahead log needs memory that only processes of one node can share. Only the setting
  `store.directory` can override this.
- A database that store.json does not name is outdated, since the run has continued with another
  database.
- A process that is not on the database's node reads the replica.
- Only one process at a time writes: the process that has locked the lock file next to the database.
  The lock file names the process. The kernel releases the lock when the process dies. The writer
  thread keeps the lock until the thread ends, however long its last write takes.
"""

import contextlib
import hashlib
import json
import logging
import os
import socket
import sqlite3
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_async.errors import UserError
from megatron_async.files.disk import CannotWrite, reason
from megatron_async.files.lock import FileLock, Holder, LockHeld, LocksUnsupported
from megatron_async.files.mounts import existing, file_system_of
from megatron_async.run_directory import write_atomically
from megatron_async.store import schema as schema

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreLocation:
    """Where the database of a run's store is on one node.

    Attributes:
        run_file: The store's name, RUN/trajectories.sqlite, whether or not the database is stored
            there.
        file: Path of the database.
    """

    run_file: Path
    file: Path

    @property
    def is_external(self) -> bool:
        """Whether the database is outside the run directory."""
        return self.file != self.run_file

    @property
    def replica(self) -> Path:
        """Path of the replica, the copy of the database that is in the run directory."""
        return self.run_file.with_name(f"{self.run_file.stem}.replica{self.run_file.suffix}")

    @property
    def export_file(self) -> Path:
        """Path of the JSONL file to which compaction moves old trajectories from the database."""
        return schema.export_file(self.run_file)


def location_of_writer(run_file: Path, directory: str) -> StoreLocation:
    """Return where the database of the store `run_file` belongs if it is written on this node.

    If `directory` is set, the database belongs in a folder for this run below it, or in the run
    directory if `directory` is the run directory. If it is empty, the database belongs in the run
    directory or in a folder below the temporary directory. A directory that is known to be on
    a local disk is preferred. If neither is known to be local, a directory that is not known to be
    shared between nodes is chosen. If both are local, or nothing is known about either, the run
    directory is chosen.

    Args:
        run_file: The store's name, RUN/trajectories.sqlite.
        directory: The setting `store.directory`; empty to choose the folder automatically.

    Raises:
        UserError: The run directory and the temporary directory are both on file systems that nodes
            share, and `directory` is empty.
    """
    run = run_file.parent.resolve()
    run_file = run / run_file.name
    if directory:
        base = Path(directory)
        if base.resolve() == run:
            return StoreLocation(run_file, run_file)
    else:
        base = Path(tempfile.gettempdir())
        of_run, of_base = file_system_of(run), file_system_of(base)
        if of_run.local or not (of_run.shared or of_base.local):
            return StoreLocation(run_file, run_file)
        if of_base.shared:
            raise UserError(
                f"run directory {run} is on {of_run} and the temporary directory {base} is on "
                f"{of_base}; other nodes share both file systems. Set store.directory to a disk of "
                "the rollout manager's node"
            )
        base /= f"megatron_async-{os.getuid()}"
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return StoreLocation(run_file, base / f"{run.name}-{digest}" / run_file.name)


def prepared_location(run_file: Path, directory: str) -> StoreLocation:
    """Return where the store's database is on this node; if there is none yet, make its folder.

    Args:
        run_file: The store's name, RUN/trajectories.sqlite.
        directory: The setting `store.directory`; empty to choose the folder automatically.

    Raises:
        UserError: No suitable folder is known, or a database cannot be made in it.
    """
    location = location_of_writer(run_file, directory)
    if not location.file.exists():
        check_location(location)
        make_folder(location)
    return location


def check_location(location: StoreLocation) -> None:
    """Check that SQLite can make a working database at `location`, by making one and removing it.

    Logs a warning if the file system may be shared by other nodes.

    Raises:
        UserError: A database cannot be made there.
    """
    folder = existing(location.file.parent)
    trial = folder / f".trial-{socket.gethostname()}-{os.getpid()}"
    try:
        # Make an empty file first: if even that fails, the error of the operating system says more
        # clearly why than the error of SQLite would.
        trial.touch()
        schema.connect(trial).close()
    except (OSError, sqlite3.Error) as error:
        raise UserError(
            f"trajectory store {location.file} cannot be made in {folder}: {reason(error)}"
        ) from error
    finally:
        for file in schema.files_of(trial):
            # An error of this removal must not hide an error of making the database.
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
    if not (found := file_system_of(folder)).local:
        logger.warning(
            "the trajectory store's directory %s is on a file system that may be shared: %s. If "
            "other nodes share it, set store.directory to a disk of the rollout manager's node.",
            location.file.parent,
            found,
        )


def make_folder(location: StoreLocation) -> None:
    """Make the folder of the database at `location`.

    A folder outside the run directory gets permissions for this user only.

    Raises:
        UserError: The folder cannot be made, or it belongs to another user.
    """
    folder = location.file.parent
    try:
        folder.parent.mkdir(
            mode=0o700 if location.is_external else 0o777, parents=True, exist_ok=True
        )
        folder.mkdir(mode=0o700 if location.is_external else 0o777, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"failed to make {folder}, the folder of the trajectory store: {reason(error)}"
        ) from error
    if location.is_external and folder.lstat().st_uid != os.getuid():
        raise UserError(f"{folder}, the folder of the trajectory store, belongs to another user")


# ---------------------------------------------------------------- store.json


@dataclass(frozen=True)
class StoreRecord:
    """Content of store.json, which names the current database of a run's store.

    Attributes:
        host: Name of the node on which the database is.
        file: Path of the database; None if it is in the run directory, which may be moved.
        lineage: Number of the newest lineage in the database.
        closed_at: If the database was closed and the replica is a complete copy of it, the number
            of transactions ever committed (a count, not a time); otherwise None.
    """

    host: str
    file: str | None
    lineage: int
    closed_at: int | None = None

    def names(self, location: StoreLocation) -> bool:
        """Return whether store.json names the path of the database at `location`.

        The node is not compared, so the named database may be at the same path of another node.
        """
        return not location.is_external if self.file is None else self.file == str(location.file)

    def database(self, run_file: Path) -> Path:
        """Return the path of the database that store.json names, which may be on another node.

        `run_file` is the store's name, RUN/trajectories.sqlite.
        """
        return run_file if self.file is None else Path(self.file)

    def reachable(self, run_file: Path) -> bool:
        """Return whether this node can open the database that store.json names.

        The file must exist on this node. If store.json names another node, the file must also be
        on a file system that is not known to be shared between nodes: on a shared one the other
        node may have the database open, and its write-ahead log works on one node only.
        """
        file = self.database(run_file)
        here = self.host == socket.gethostname() or not file_system_of(file).shared
        return here and file.exists()


def read_record(run_file: Path) -> StoreRecord | None:
    """Read which database is current from the run's store.json; return None without that file.

    A new run has no store.json, nor has a run of a version that did not write it. A file that
    cannot be read counts as missing, with a warning.
    """
    try:
        return StoreRecord(**json.loads(_record_file(run_file).read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        logger.warning("ignoring %s, which cannot be read: %s", _record_file(run_file), error)
        return None


def write_record(location: StoreLocation, lineage: int, closed_at: int | None = None) -> None:
    """Write store.json durably, which makes the database at `location` the run's current database.

    Args:
        location: Where the database is.
        lineage: Number of the newest lineage in the database.
        closed_at: Number of transactions ever committed (a count, not a time), if the database is
            closed and its replica (the copy in the run directory) has all of them. None while the
            database is open, or if the replica is incomplete.

    Raises:
        CannotWrite: The disk refuses the file.
    """
    file = str(location.file) if location.is_external else None
    record = StoreRecord(socket.gethostname(), file, lineage, closed_at)
    write_atomically(_record_file(location.run_file), json.dumps(asdict(record)), durable=True)


def remove_replicated_database(location: StoreLocation, lineage: int, position: int) -> None:
    """Record in store.json that the database's replica is complete; then delete the database.

    Args:
        location: Where the database is; its replica must already be a complete copy.
        lineage: Number of the newest lineage in the database.
        position: Number of transactions ever committed to the database.

    Raises:
        CannotWrite: store.json cannot be written.
        OSError: The database cannot be deleted.
    """
    write_record(location, lineage, position)
    schema.remove(location.file)


def _record_file(run_file: Path) -> Path:
    return run_file.with_name("store.json")


# ---------------------------------------------------------------- readers


@dataclass(frozen=True)
class ReadableStore:
    """A database file of a store that this process can read: the database or its replica.

    Attributes:
        file: The database, or the replica where the database cannot be opened.
        is_replica: Whether `file` is the replica.
        note: Notice for the user that the replica is as old as the last checkpoint; empty if `file`
            has everything.
    """

    file: Path
    is_replica: bool = False
    note: str = ""


def has_store(run_file: Path) -> bool:
    """Return whether the run has a trajectory store on any node.

    `run_file` is the store's name, RUN/trajectories.sqlite.
    """
    record = read_record(run_file)
    is_external = record is not None and record.file is not None
    return is_external or run_file.exists() or StoreLocation(run_file, run_file).replica.exists()


def location_of_reader(run_file: Path) -> ReadableStore:
    """Return the store's database if this node can open it, else its replica (a copy of it).

    Raises:
        UserError: The run has no store, or its database is not on this node and has no replica.
    """
    record = read_record(run_file) or StoreRecord(socket.gethostname(), None, 0)
    if record.reachable(run_file):
        return ReadableStore(record.database(run_file))
    replica = StoreLocation(run_file, run_file).replica
    where = f"{record.database(run_file)} on {record.host}"
    if replica.exists():
        note = f"the run's trajectory store is {where}; this is its replica of the last checkpoint"
        return ReadableStore(replica, True, "" if record.closed_at is not None else note)
    if record.file is not None:
        raise UserError(
            f"the trajectory store of {run_file.parent} is {where}, which this node cannot open; "
            "it has no replica yet"
        )
    raise UserError(f"trajectory store {run_file} does not exist")


# ---------------------------------------------------------------- the lock


def check_not_in_use(run_file: Path) -> None:
    """Check that no process of this node is writing to the store.

    Other nodes need not be checked: `run.lock`, the lock of the run directory, keeps their
    processes out.

    Raises:
        UserError: A process has the store open for writing, or the store cannot be locked.
    """
    record = read_record(run_file)
    database = run_file if record is None else record.database(run_file)
    if database.parent.exists():
        lock_store(database).close()


def lock_store(path: Path) -> FileLock:
    """Lock the database `path` against other writers; return the lock, which the caller closes.

    The lock is on the file PATH.lock, which names the process that holds it.

    Raises:
        UserError: A process holds the lock, the file system does not support locks, or the lock
            file cannot be written.
    """
    file = path.with_name(path.name + ".lock")
    try:
        return FileLock.acquire(file, Holder.this_process("trajectory store"))
    except CannotWrite as error:
        raise UserError(str(error)) from error
    except LocksUnsupported as error:
        raise UserError(
            f"trajectory store {path} cannot be locked ({error}) on {file_system_of(path)}. Set "
            "store.directory to a local disk of the rollout manager's node"
        ) from error
    except LockHeld as held:
        if held.holder is not None and held.holder.is_here and held.holder.pid == os.getpid():
            raise UserError(
                f"trajectory store {path} is in use by this process, in which an earlier write has "
                "not ended"
            ) from held
        raise UserError(f"trajectory store {path} is in use by {held}") from held
