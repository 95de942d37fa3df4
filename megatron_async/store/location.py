"""Place of a run's store: the database on a disk of the manager's node, a replica for the others.

    RUN/trajectories.sqlite          the database, where the run directory is on a local disk
    DIR/NAME-HASH/trajectories.sqlite    else: below `store.directory` or the temporary directory
    RUN/trajectories.replica.sqlite  a copy that never changes, replaced at every checkpoint
    RUN/store.json                   the node and the database that count

Invariants
- The database is on a file system that belongs to one node, unless `store.directory` names
  another: SQLite's log is memory that processes of one node share.
- A database that store.json does not name is stale: the run has gone on elsewhere since.
- Whoever is not on the database's node reads the replica.
- One process at a time writes: it holds the lock of the file beside the database, which is the
  kernel's and ends with its process. The file names that process. The writer's thread holds it to
  its own end (`writer`), however long its last write takes.
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
    """`run_file` is the store's name, RUN/trajectories.sqlite, `file` the database."""

    run_file: Path
    file: Path

    @property
    def is_external(self) -> bool:
        """Return whether the database is outside the run directory."""
        return self.file != self.run_file

    @property
    def replica(self) -> Path:
        return self.run_file.with_name(f"{self.run_file.stem}.replica{self.run_file.suffix}")

    @property
    def export_file(self) -> Path:
        """Return the file in which compaction puts consumed trajectories."""
        return schema.export_file(self.run_file)


def location_of_writer(run_file: Path, directory: str) -> StoreLocation:
    """Find the place on this node; `directory` is `store.directory`. Raises UserError."""
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
                f"run directory {run} is on {of_run} and the temporary directory on {of_base}, "
                "which other nodes share: set store.directory to a disk of the rollout manager's "
                "node"
            )
        base /= f"megatron_async-{os.getuid()}"
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:8]
    return StoreLocation(run_file, base / f"{run.name}-{digest}" / run_file.name)


def prepared_location(run_file: Path, directory: str) -> StoreLocation:
    """`location_of_writer`, where a database is or can be made. Raises UserError."""
    location = location_of_writer(run_file, directory)
    if not location.file.exists():
        check_location(location)
        make_folder(location)
    return location


def check_location(location: StoreLocation) -> None:
    """Check that a database would work there; leaves nothing behind. Raises UserError."""
    folder = existing(location.file.parent)
    trial = folder / f".trial-{socket.gethostname()}-{os.getpid()}"
    try:
        trial.touch()  # where not even that is possible the system's reason is better than SQLite's
        schema.connect(trial).close()
    except (OSError, sqlite3.Error) as error:
        raise UserError(
            f"trajectory store {location.file} cannot be made in {folder}: {reason(error)}"
        ) from error
    finally:
        for file in schema.files_of(trial):
            with contextlib.suppress(OSError):  # the error of the database is the one that matters
                file.unlink(missing_ok=True)
    if not (found := file_system_of(folder)).local:
        logger.warning(
            "the trajectory store will be in %s on %s; if other nodes share that file system, set "
            "store.directory to a disk of the rollout manager's node",
            location.file.parent,
            found,
        )


def make_folder(location: StoreLocation) -> None:
    """Make the database's folder; outside the run directory only this user can enter it.

    Raises UserError.
    """
    folder = location.file.parent
    try:
        folder.parent.mkdir(
            mode=0o700 if location.is_external else 0o777, parents=True, exist_ok=True
        )
        folder.mkdir(mode=0o700 if location.is_external else 0o777, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder}, for the trajectory store, cannot be made: {reason(error)}"
        ) from error
    if location.is_external and folder.lstat().st_uid != os.getuid():
        raise UserError(f"{folder}, for the trajectory store, belongs to somebody else")


# ---------------------------------------------------------------- the record


@dataclass(frozen=True)
class Record:
    """Content of store.json; `file` is None in the run directory, which may be moved.

    `lineage` is the newest that the database has; `closed_at` the position at which its writer has
    closed it and made its last replica.
    """

    host: str
    file: str | None
    lineage: int
    closed_at: int | None = None

    def names(self, location: StoreLocation) -> bool:
        """Return whether this names the database of `place`."""
        return not location.is_external if self.file is None else self.file == str(location.file)

    def database(self, run_file: Path) -> Path:
        """Return its path, which may be on another node."""
        return run_file if self.file is None else Path(self.file)

    def reachable(self, run_file: Path) -> bool:
        """Return whether the database can be opened on this node."""
        file = self.database(run_file)
        here = self.host == socket.gethostname() or not file_system_of(file).shared
        return here and file.exists()


def read_record(run_file: Path) -> Record | None:
    """Read the record; None: the run is new, or older than the record."""
    try:
        return Record(**json.loads(_record_file(run_file).read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        logger.warning("%s cannot be read: %s", _record_file(run_file), error)
        return None


def write_record(location: StoreLocation, lineage: int, closed_at: int | None = None) -> None:
    """Record durably that this node's database counts from now on. Raises CannotWrite."""
    file = str(location.file) if location.is_external else None
    record = Record(socket.gethostname(), file, lineage, closed_at)
    write_atomically(_record_file(location.run_file), json.dumps(asdict(record)), durable=True)


def leave(location: StoreLocation, lineage: int, position: int) -> None:
    """Remove this node's database, which the replica holds whole. Raises CannotWrite, OSError."""
    write_record(location, lineage, position)
    schema.remove(location.file)


def _record_file(run_file: Path) -> Path:
    return run_file.with_name("store.json")


# ---------------------------------------------------------------- readers


@dataclass(frozen=True)
class ReadableStore:
    """A file that this process may read; `note` names what a replica does not hold."""

    file: Path
    is_replica: bool = False
    note: str = ""


def has_store(run_file: Path) -> bool:
    """Return whether the run has a trajectory store, wherever that lies."""
    record = read_record(run_file)
    is_external = record is not None and record.file is not None
    return is_external or run_file.exists() or StoreLocation(run_file, run_file).replica.exists()


def location_of_reader(run_file: Path) -> ReadableStore:
    """The database where it can be reached, else the replica. Raises UserError."""
    record = read_record(run_file) or Record(socket.gethostname(), None, 0)
    if record.reachable(run_file):
        return ReadableStore(record.database(run_file))
    replica = StoreLocation(run_file, run_file).replica
    where = f"{record.database(run_file)} on {record.host}"
    if replica.exists():
        note = f"the run's trajectory store is {where}; this is its replica of the last checkpoint"
        return ReadableStore(replica, True, "" if record.closed_at is not None else note)
    if record.file is not None:
        raise UserError(
            f"the trajectory store of {run_file.parent} is {where}, and it has no replica yet"
        )
    raise UserError(f"there is no trajectory store {run_file}")


# ---------------------------------------------------------------- the lock


def check_not_in_use(run_file: Path) -> None:
    """Raises UserError while a process of this node writes the store (`run.lock` is for others)."""
    record = read_record(run_file)
    database = run_file if record is None else record.database(run_file)
    if database.parent.exists():
        lock_store(database).close()


def lock_store(path: Path) -> FileLock:
    """Keep other writers out until the lock is closed.

    Raises UserError when a writer has it, where there are no locks, and when it cannot be written.
    """
    file = path.with_name(path.name + ".lock")
    try:
        return FileLock.take(file, Holder.this_process("trajectory store"))
    except CannotWrite as error:
        raise UserError(str(error)) from error
    except LocksUnsupported as error:
        raise UserError(
            f"trajectory store {path} cannot be locked ({error}) on {file_system_of(path)}: set "
            "store.directory to a local disk of the rollout manager's node"
        ) from error
    except LockHeld as held:
        if held.holder is not None and held.holder.is_here and held.holder.pid == os.getpid():
            raise UserError(
                f"{path} is in use by this process, in which an earlier write has not ended"
            ) from held
        raise UserError(f"{path} is in use by {held}") from held
