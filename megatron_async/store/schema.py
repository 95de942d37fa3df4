"""Defines the tables of the trajectory store's SQLite database and the classes of their rows.

Invariants
- Every row ends with a CRC-32 over its table's name and its other columns (except for the automatic
  key of `chunks`). The CRC detects a row that differs from what was written, which SQLite does not:
  SQLite checks the structure of its pages, but not the content of rows.
- Rows are written whole and never updated in place by SQL expressions.
- The columns of a table are the fields of its row class, with the key first and bytes last.
  Renaming or moving a field therefore makes a new format.
- Chunks are only appended, in the order of arrival; an index finds the chunks of a trajectory.
- A file of another format is refused, and nothing in it is changed.
"""

import sqlite3
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np

from megatron_async.errors import UserError
from megatron_async.files.mounts import file_system_of
from megatron_async.store.lineage import Lineage
from megatron_async.trajectory.types import TrajectoryState

FORMAT = 8
APPLICATION_ID = 0x4D415453  # "MATS"
PAGE_BYTES = 8192
EXPORT_NAME = "trajectories.jsonl"
# One statement inserts up to this many rows. With one statement per row, the writer thread would
# release the GIL for every row, and might have to wait for other threads to get it back.
_ROWS_PER_INSERT = 250
_CACHE_KIB = 64 * 1024
_WAL_PAGES = 16 * 1024 * 1024 // PAGE_BYTES
_NO_SHARED_MEMORY = (
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_IOERR_SHMSIZE,
    sqlite3.SQLITE_IOERR_SHMLOCK,
    sqlite3.SQLITE_IOERR_SHMMAP,
)

Value = int | float | str | bytes | None
Row = tuple[Value, ...]
R = TypeVar("R", bound=NamedTuple)


class DamagedStore(Exception):
    """Raised when the content of a store's file is not what was written; describes the damage."""


class ProgressRow(NamedTuple):
    """The only row of table `progress`, which has the number of committed transactions.

    Attributes:
        id: Always 1.
        position: Number of transactions ever committed to the store.
    """

    id: int
    position: int


class DocumentRow(NamedTuple):
    """A row of table `document`: one dataclass of `store/documents.py` as JSON."""

    id: int
    content: str


class CheckpointRow(NamedTuple):
    """A finalized checkpoint of the run.

    Attributes:
        id: Number of the checkpoint in the order of recording, from 1.
        lineage: Lineage of the checkpoint.
        step: Policy number of the checkpoint's weights.
        position: Number of transactions committed when the checkpoint was recorded.
    """

    id: int
    lineage: int
    step: int
    position: int


class BatchRow(NamedTuple):
    """The batch that was made for one update.

    Attributes:
        id: Key of the row.
        lineage: Lineage on which the batch was made; every resume of the run starts a new lineage.
        step: Number of the update.
        drop_reason: Reason why the trainer dropped the batch; None if it did not.
        trajectory_ids: Ids of the trajectories as int64 bytes; empty for a dropped batch, and after
            compaction (export and removal of old trajectories) has removed all of them.
    """

    id: int
    lineage: int
    step: int
    drop_reason: str | None
    trajectory_ids: bytes

    def ids(self) -> list[int]:
        """Return the ids of the batch's trajectories as integers."""
        return [int(i) for i in np.frombuffer(self.trajectory_ids, dtype="<i8")]


def export_file(store: Path) -> Path:
    """Return the path of the JSONL file to which old trajectories of `store` are moved.

    `store` is the store's name, RUN/trajectories.sqlite.
    """
    return store.parent / "export" / EXPORT_NAME


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return trajectory ids as the int64 bytes that `BatchRow.trajectory_ids` stores."""
    return np.fromiter(ids, dtype="<i8").tobytes()


class GroupRow(NamedTuple):
    """A prompt with its group of trajectories.

    Attributes:
        group_id: Key of the row.
        first_trajectory: Id of the first trajectory; the ids of the group are consecutive.
        size: Number of trajectories.
        task: Name of the prompt's task.
        payload: Data that the task stores with the prompt, as JSON.
        priority: The prompt's priority; higher priorities are generated first.
        token_ids: Token ids of the prompt as int32 bytes.
    """

    group_id: int
    first_trajectory: int
    size: int
    task: str
    payload: str
    priority: int
    token_ids: bytes

    @property
    def trajectory_ids(self) -> range:
        """Ids of the group's trajectories."""
        return range(self.first_trajectory, self.first_trajectory + self.size)


class TrajectoryRow(NamedTuple):
    """The state of one trajectory, without its tokens.

    Attributes:
        trajectory_id: Key of the row.
        group_id: Group of the trajectory.
        revision: Number of changes of state so far.
        attempt: Number of restarts so far; chunks and turns of smaller attempts are outdated.
        chunks: Number of the current attempt's chunks that had been passed to the writer when this
            row was.
        state: A `TrajectoryState` other than `batched`.
        finish_reason: Reason why the response ended; None if it has not ended.
        reward: Reward; None if the trajectory has not been scored.
        reward_detail: Components of the reward, as JSON.
        drop_reason: Reason why the trajectory was dropped; None if it was not.
    """

    trajectory_id: int
    group_id: int
    revision: int = 0
    attempt: int = 0
    chunks: int = 0
    state: str = TrajectoryState.PENDING.value
    finish_reason: str | None = None
    reward: float | None = None
    reward_detail: str = "{}"
    drop_reason: str | None = None


class ChunkRow(NamedTuple):
    """A chunk: some consecutive tokens of one segment of a trajectory.

    Attributes:
        trajectory_id: Trajectory of the tokens.
        attempt: Attempt of the trajectory, which is the number of restarts before these tokens.
        seq: Number of the chunk within the attempt, from 0.
        segment: Number of the segment within the attempt, from 0.
        lineage: Lineage of the policy version that generated the tokens.
        number: Number of that policy version.
        engine_id: Engine that generated the tokens.
        environment: 1 if the environment wrote the tokens, else 0.
        columns: Types of the columns beyond token ids and log-probs (`trajectory/columns.py`); None
            if there are none.
        data: All columns of the tokens, one after the other.
    """

    trajectory_id: int
    attempt: int
    seq: int
    segment: int
    lineage: int
    number: int
    engine_id: str
    environment: int
    columns: str | None
    data: bytes


class TurnRow(NamedTuple):
    """A turn of an episode, with the fields of `trajectory.types.Turn`.

    Attributes:
        turn_id: Key of the row.
        trajectory_id: Trajectory of the turn.
        attempt: Attempt of the trajectory, which is the number of restarts before this turn.
        messages: New messages of the environment, as JSON.
        answer: Text and tool calls of the policy's response, as JSON; None without a response.
        state: Snapshot of the environment; None for every turn but the newest.
    """

    turn_id: int
    trajectory_id: int
    attempt: int
    number: int
    parent: int | None
    segment: int
    end: str | None
    reward: float
    messages: str
    answer: str | None
    state: bytes | None


Kind = type[NamedTuple]
TABLES: dict[Kind, str] = {
    ProgressRow: "progress",
    DocumentRow: "document",
    Lineage: "lines",
    CheckpointRow: "checkpoints",
    BatchRow: "batches",
    GroupRow: "groups",
    TrajectoryRow: "trajectories",
    ChunkRow: "chunks",
    TurnRow: "turns",
}
PART_KEYS: dict[Kind, str] = {ChunkRow: "chunk_id", TurnRow: "turn_id"}
"""Row classes of what a trajectory consists of (chunks and turns), with the names of their keys."""
_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


def columns(kind: Kind) -> str:
    """Return the names of the columns of row class `kind` and of its CRC, as an SQL list."""
    return ", ".join((*kind._fields, "crc"))


def checksum(table: str, values: Sequence[Value]) -> int:
    """Return the CRC-32 of a row of table `table`.

    Args:
        table: Name of the table.
        values: The row without its CRC. Only the last value may be bytes.

    The CRC of a chunk without columns beyond token ids and log-probs leaves out the field
    `columns`; it is the same as in format 4, which did not have that field.
    """
    last = values[-1]
    if isinstance(last, bytes):
        end = -2 if table == TABLES[ChunkRow] and values[-2] is None else -1
        return zlib.crc32(last, zlib.crc32(repr((table, *values[:end])).encode()))
    return zlib.crc32(repr((table, *values)).encode())


def with_checksum(row: NamedTuple) -> Row:
    """Return the values of `row` with its CRC appended, as they are written to the database."""
    return (*row, checksum(TABLES[type(row)], row))


def opened(kind: type[R], values: Sequence[Value]) -> R:
    """Check the CRC at the end of a row of the table of `kind`; return the row without the CRC.

    Raises:
        DamagedStore: The CRC does not match the row.
    """
    table = TABLES[kind]
    if values[-1] != checksum(table, values[:-1]):
        raise DamagedStore(f"a row of table {table} has a wrong checksum (key {values[0]!r})")
    return kind._make(values[:-1])


def write_rows(connection: sqlite3.Connection, kind: Kind, rows: Sequence[Row]) -> None:
    """Insert `rows` into the table of `kind`; each replaces an existing row with the same key.

    The rows must have their CRCs (`with_checksum`). Many rows are written by each SQL statement.
    """
    into = f"INSERT OR REPLACE INTO {TABLES[kind]} ({columns(kind)})"
    for start in range(0, len(rows), _ROWS_PER_INSERT):
        part = rows[start : start + _ROWS_PER_INSERT]
        one = f"({', '.join('?' * len(part[0]))})"
        connection.execute(
            f"{into} VALUES {', '.join([one] * len(part))}",
            [value for row in part for value in row],
        )


def files_of(database: Path) -> tuple[Path, Path, Path]:
    """Return the paths of a database, of its write-ahead log and of the log's shared memory."""
    name = database.name
    return database, database.with_name(f"{name}-wal"), database.with_name(f"{name}-shm")


def remove(database: Path) -> None:
    """Delete a database file and its log, if they exist; no process may have the database open.

    Raises:
        OSError: A file cannot be deleted.
    """
    for file in files_of(database):
        file.unlink(missing_ok=True)


def connect(path: Path, *, read_only: bool = False, immutable: bool = False) -> sqlite3.Connection:
    """Open the database `path` with the settings of the store; make an empty file if it is missing.

    The settings are a write-ahead log with synchronous=NORMAL: a commit survives the death of every
    process; a power loss may undo the newest commits, but never a part of one.

    Args:
        path: The database.
        read_only: Whether to open it for reading only; a missing file is then an error.
        immutable: Whether to open it for reading as a file that no process changes, which needs no
            locks and no log.

    Raises:
        sqlite3.Error: SQLite cannot open the file.
        OSError: The file cannot be made.
        UserError: The file system does not support a write-ahead log.
    """
    mode = "ro" if read_only else "rwc"
    if immutable:
        mode = "ro&immutable=1"
    if mode == "rwc" and not path.exists():
        # SQLite would make the file with mode 644 at most, even if the umask allows more.
        path.touch()
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=30.0,
    )
    try:
        connection.execute(f"PRAGMA cache_size=-{_CACHE_KIB}")
        if not read_only:
            connection.execute(f"PRAGMA page_size={PAGE_BYTES}")
            connection.execute("PRAGMA auto_vacuum=INCREMENTAL")
            _use_log(connection, path)
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(f"PRAGMA wal_autocheckpoint={_WAL_PAGES}")
    except BaseException:
        connection.close()
        raise
    return connection


def _use_log(connection: sqlite3.Connection, path: Path) -> None:
    """Turn on the write-ahead log of the database that `connection` has open.

    Raises:
        UserError: The file system of `path` does not support that log or its shared memory.
    """
    try:
        got = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        # This read maps the shared memory of the log.
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) not in _NO_SHARED_MEMORY:
            raise
        got = str(error)
    if got != "wal":
        raise UserError(
            f"trajectory store {path} is on {file_system_of(path)}, which does not support the "
            f"shared memory of SQLite's log ({got}). Set store.directory to a local disk of the "
            "rollout manager's node"
        )


def create_tables(connection: sqlite3.Connection) -> None:
    """Create the tables and indexes of a store that the database does not have yet."""
    connection.execute("BEGIN IMMEDIATE")
    for kind, table in TABLES.items():
        definitions = [
            f"{name} {_TYPES[(get_args(hint) or (hint,))[0]]}"  # For `str | None`, use `str`.
            for name, hint in get_type_hints(kind).items()
        ]
        if kind is ChunkRow:
            definitions.insert(0, "chunk_id INTEGER")
        definitions[0] += " PRIMARY KEY"
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(definitions)}, crc INTEGER)"
        )
    for part in PART_KEYS:
        name, place = f"{TABLES[part]}_of", f"{TABLES[part]} (trajectory_id, attempt)"
        connection.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {place}")
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={FORMAT}")
    connection.execute("COMMIT")


def checked_format(connection: sqlite3.Connection, path: Path) -> int:
    """Check that a database has this version's format of the trajectory store; return the format.

    Returns:
        Number of the format; 0 for an empty database.

    Raises:
        UserError: The database is not a trajectory store, or has another format.
    """
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise UserError(f"{path} is an SQLite database, but not a trajectory store")
    if tables and version != FORMAT:
        raise UserError(
            f"trajectory store {path} has format {version}; this version of megatron_async reads "
            f"format {FORMAT}. Continue the run with the version that wrote it"
        )
    return version
