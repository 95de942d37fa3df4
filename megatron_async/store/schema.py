"""Tables of the trajectory store, and the rows that go into them.

Invariants
- Every row ends with a CRC-32 over its table's name and its other columns (the automatic key of
  `chunks` excepted). SQLite checks the structure of its pages, not their content; with the CRC a
  row is either what was written or is known to be damaged.
- Rows are written whole and never updated in place by SQL expressions.
- The columns of a table are the fields of its rows' class, the key first, bytes last: to rename a
  field or to change its place is another format.
- Chunks are only ever appended in the order of arrival; a trajectory's are found by index.
- A file of another format is refused, and nothing in it changes.
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

FORMAT = 7
APPLICATION_ID = 0x4D415453  # "MATS"
PAGE_BYTES = 8192
EXPORT_NAME = "trajectories.jsonl"
_ROWS_PER_INSERT = 250  # one GIL hand-over for this many rows
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
    """The file is not what was written; holds what was found."""


class ProgressRow(NamedTuple):
    """The only row: transactions ever committed."""

    id: int
    position: int


class DocumentRow(NamedTuple):
    """Counts that outlive rows, as JSON (`reader.Document`)."""

    id: int
    content: str


class CheckpointRow(NamedTuple):
    """A finalized checkpoint, and the position at which it was recorded."""

    id: int
    lineage: int
    step: int
    position: int


class BatchRow(NamedTuple):
    """`trajectory_ids` of the batch (lineage, step), int64 bytes; empty when it was dropped."""

    id: int
    lineage: int
    step: int
    drop_reason: str | None
    trajectory_ids: bytes

    def ids(self) -> list[int]:
        """The trajectories as integers."""
        return [int(i) for i in np.frombuffer(self.trajectory_ids, dtype="<i8")]


def export_file(store: Path) -> Path:
    """Return the file in which compaction puts the consumed trajectories of a store."""
    return store.parent / "export" / EXPORT_NAME


def pack_ids(ids: Iterable[int]) -> bytes:
    """Inverse of `BatchRow.ids`."""
    return np.fromiter(ids, dtype="<i8").tobytes()


class GroupRow(NamedTuple):
    """A prompt and its trajectories `first_trajectory .. first_trajectory + size - 1`."""

    group_id: int
    first_trajectory: int
    size: int
    task: str
    payload: str
    priority: int
    token_ids: bytes

    @property
    def trajectory_ids(self) -> range:
        return range(self.first_trajectory, self.first_trajectory + self.size)


class TrajectoryRow(NamedTuple):
    """State of one trajectory but for its tokens; `chunks` were submitted when it was written."""

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
    """Tokens of one author, number `seq` of an attempt, within one segment.

    `data` is the blob of all columns, `columns` the declarations of the further ones
    (`trajectory/columns.py`).
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
    """A turn of an episode (`trajectory.types.Turn`); `messages` and `answer` are JSON."""

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
PARTS: dict[Kind, str] = {ChunkRow: "chunk_id", TurnRow: "turn_id"}
"""Rows that are parts of a trajectory, with their key; each is of one attempt."""
_TYPES = {int: "INTEGER", float: "REAL", str: "TEXT", bytes: "BLOB"}


def columns(kind: Kind) -> str:
    """The columns of a row with its CRC, for a statement."""
    return ", ".join((*kind._fields, "crc"))


def checksum(table: str, values: Sequence[Value]) -> int:
    """CRC-32 of a row (without its last column). Only the last of `values` may be bytes.

    A chunk without further columns has the one that it had in format 4.
    """
    last = values[-1]
    if isinstance(last, bytes):
        end = -2 if table == TABLES[ChunkRow] and values[-2] is None else -1
        return zlib.crc32(last, zlib.crc32(repr((table, *values[:end])).encode()))
    return zlib.crc32(repr((table, *values)).encode())


def sealed(row: NamedTuple) -> Row:
    """A row with its CRC, as it is written."""
    return (*row, checksum(TABLES[type(row)], row))


def opened(kind: type[R], values: Sequence[Value]) -> R:
    """A row without its CRC, after comparing it. Raises DamagedStore."""
    table = TABLES[kind]
    if values[-1] != checksum(table, values[:-1]):
        raise DamagedStore(f"a row of table {table} does not have its checksum (key {values[0]!r})")
    return kind._make(values[:-1])


def write_rows(connection: sqlite3.Connection, kind: Kind, rows: Sequence[Row]) -> None:
    """Write sealed rows, each whole in place of the one with its key; many for each statement."""
    into = f"INSERT OR REPLACE INTO {TABLES[kind]} ({columns(kind)})"
    for start in range(0, len(rows), _ROWS_PER_INSERT):
        part = rows[start : start + _ROWS_PER_INSERT]
        one = f"({', '.join('?' * len(part[0]))})"
        connection.execute(
            f"{into} VALUES {', '.join([one] * len(part))}",
            [value for row in part for value in row],
        )


def files_of(database: Path) -> tuple[Path, Path, Path]:
    """The database, its log and the log's shared memory."""
    name = database.name
    return database, database.with_name(f"{name}-wal"), database.with_name(f"{name}-shm")


def remove(database: Path) -> None:
    """Remove a database that nobody has open, if it is there. Raises OSError."""
    for file in files_of(database):
        file.unlink(missing_ok=True)


def connect(path: Path, *, read_only: bool = False, immutable: bool = False) -> sqlite3.Connection:
    """A connection with the store's settings; `immutable`: to a file that never changes.

    WAL with synchronous=NORMAL: a commit survives the death of every process; a power loss may
    take the newest commits away, but never a part of one. Raises sqlite3.Error, OSError, UserError
    where the file system cannot have a write-ahead log.
    """
    mode = "ro" if read_only else "rwc"
    if immutable:
        mode = "ro&immutable=1"
    if mode == "rwc" and not path.exists():
        path.touch()  # SQLite would make it with mode 644 at most, whatever umask allows.
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
    """Refuse a place where SQLite has no log, or cannot share its memory. Raises UserError."""
    try:
        got = connection.execute("PRAGMA journal_mode=WAL").fetchone()[0]
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()  # maps the memory
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) not in _NO_SHARED_MEMORY:
            raise
        got = str(error)
    if got != "wal":
        raise UserError(
            f"trajectory store {path} is on {file_system_of(path)}, which does not support the "
            f"shared memory of SQLite's log ({got}): set store.directory to a local disk of the "
            "rollout manager's node"
        )


def create_tables(connection: sqlite3.Connection) -> None:
    """Make an empty store. No effect on one that has its tables."""
    connection.execute("BEGIN IMMEDIATE")
    for kind, table in TABLES.items():
        definitions = [
            f"{name} {_TYPES[(get_args(hint) or (hint,))[0]]}"  # of `str | None`: str
            for name, hint in get_type_hints(kind).items()
        ]
        if kind is ChunkRow:
            definitions.insert(0, "chunk_id INTEGER")
        definitions[0] += " PRIMARY KEY"
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS {table} ({', '.join(definitions)}, crc INTEGER)"
        )
    for part in PARTS:
        name, place = f"{TABLES[part]}_of", f"{TABLES[part]} (trajectory_id, attempt)"
        connection.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {place}")
    connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version={FORMAT}")
    connection.execute("COMMIT")


def checked_format(connection: sqlite3.Connection, path: Path) -> int:
    """Return the format (0: a new file). Raises UserError for another one, or for no store."""
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if tables and application != APPLICATION_ID:
        raise UserError(f"{path} is an SQLite database, but not a trajectory store")
    if tables and version != FORMAT:
        raise UserError(
            f"trajectory store {path} has format {version}, and this version of megatron_async "
            f"reads {FORMAT}; go on with the run by the version that wrote it"
        )
    return version
