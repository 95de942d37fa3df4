"""Reads the database of a store: checks every row and assembles trajectories from their chunks.

The functions are used when a store is opened. `StoreReader` is for other processes, which may read
a store while its run continues. Any number of them may do so; on other nodes than the writer's they
read the replica (the copy of the database in the run directory).

Invariants
- A row whose CRC is wrong raises DamagedStore; no unchecked row is returned from this module.
- A trajectory's tokens are the longest sequence of its chunks, from the first chunk on, that has no
  gap. If chunks are missing, `Tokens.complete` is false.
"""

import itertools
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megatron_async.errors import UserError
from megatron_async.store import schema as schema
from megatron_async.store.documents import Counters, Exported, read_rows
from megatron_async.store.lineage import Consumption, Lineage, LineageTree
from megatron_async.store.location import location_of_reader
from megatron_async.store.schema import (
    BatchRow,
    CheckpointRow,
    ChunkRow,
    DamagedStore,
    GroupRow,
    ProgressRow,
    TrajectoryRow,
    TurnRow,
)
from megatron_async.trajectory.columns import token_bytes, unpacked
from megatron_async.trajectory.types import (
    DropReason,
    FinishReason,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
    Turn,
)

P = TypeVar("P", ChunkRow, TurnRow)
NO_PROMPT = Prompt(np.empty(0, dtype=np.int32), "")


@dataclass
class StoreContent:
    """Everything that a store's database contains, except chunks and turns.

    Attributes:
        position: Number of transactions ever committed.
        counters: Counters of used ids and read prompts.
        exported: Totals of what compaction has removed.
        tree: All lineages.
        checkpoints: Finalized checkpoints, in the order in which they were recorded.
        batches: Batches of all lineages.
        groups: Groups by id.
        trajectories: Trajectories by id.
    """

    position: int
    counters: Counters
    exported: Exported
    tree: LineageTree
    checkpoints: list[PolicyVersion]
    batches: list[BatchRow]
    groups: dict[int, GroupRow]
    trajectories: dict[int, TrajectoryRow]

    def batched_steps(self, consumption: Consumption) -> dict[int, int]:
        """Return, by trajectory id, the step of each trajectory's batch, if `consumption` has it.

        Trajectories that are in no batch of `consumption` are left out.
        """
        return {i: batch.step for i, batch in consumed_by(self.batches, consumption).items()}


def consumed_by(batches: Iterable[BatchRow], consumption: Consumption) -> dict[int, BatchRow]:
    """Return, by trajectory id, the batch in `consumption` that contains the trajectory.

    Args:
        batches: Batches to look at, of any lineage.
        consumption: The set of batches that count, which are those consumed at one policy version;
            other batches are ignored.
    """
    return {
        trajectory_id: batch
        for batch in batches
        if consumption.contains(batch.lineage, batch.step)
        for trajectory_id in batch.ids()
    }


@contextmanager
def at_one_moment(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the block in one read transaction: all its reads see the same state of the database.

    If the connection is already in a transaction, the block becomes part of that transaction.
    """
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


def read_position(connection: sqlite3.Connection) -> int:
    """Return the number of transactions ever committed to the database; 0 for an empty database.

    Raises:
        DamagedStore: The checksum of the row is wrong.
        sqlite3.DatabaseError: SQLite cannot read the file.
    """
    return max((row.position for row in read_rows(connection, ProgressRow)), default=0)


def read_content(connection: sqlite3.Connection) -> StoreContent:
    """Read and check everything in the database except chunks and turns.

    Raises:
        DamagedStore: A checksum is wrong, or a row is missing that others refer to.
        sqlite3.DatabaseError: SQLite cannot read the file.
    """
    with at_one_moment(connection):
        tree = LineageTree(read_rows(connection, Lineage))
        counters = Counters.read(connection)
        if counters is None and tree:
            raise DamagedStore("the row of the counters is missing")
        content = StoreContent(
            position=read_position(connection),
            counters=counters or Counters(),
            exported=Exported.read(connection) or Exported(),
            tree=tree,
            checkpoints=[
                PolicyVersion(row.lineage, row.step) for row in read_rows(connection, CheckpointRow)
            ],
            batches=list(read_rows(connection, BatchRow)),
            groups={row.group_id: row for row in read_rows(connection, GroupRow)},
            trajectories={row.trajectory_id: row for row in read_rows(connection, TrajectoryRow)},
        )
    members = {i for row in content.groups.values() for i in row.trajectory_ids}
    if odd := members ^ content.trajectories.keys():
        raise DamagedStore(f"the row of trajectory {min(odd)} or of its group is missing")
    return content


def newest_turn(connection: sqlite3.Connection) -> int:
    """Return the largest key in the database's table of turns; 0 if the table is empty."""
    return int(connection.execute("SELECT ifnull(max(turn_id), 0) FROM turns").fetchone()[0])


def read_group(connection: sqlite3.Connection, group_id: int) -> GroupRow:
    """Read the row of one group.

    Raises:
        DamagedStore: The row is missing, or its checksum is wrong.
    """
    for row in read_rows(connection, GroupRow, "group_id = ?", group_id):
        return row
    raise DamagedStore(f"the row of group {group_id} is missing")


@dataclass
class Parts:
    """Rows of the chunks and turns of some trajectories, in unsorted lists by trajectory id.

    Each restart of a trajectory begins a new attempt. Rows of earlier attempts may be included.
    """

    chunks: dict[int, list[ChunkRow]]
    turns: dict[int, list[TurnRow]]


def read_parts(connection: sqlite3.Connection, trajectory_ids: Sequence[int]) -> Parts:
    """Read all chunks and turns of the trajectories `trajectory_ids`.

    Raises:
        DamagedStore: The checksum of a row is wrong.
    """
    return Parts(
        _of_trajectories(connection, ChunkRow, trajectory_ids),
        _of_trajectories(connection, TurnRow, trajectory_ids),
    )


def _of_trajectories(
    connection: sqlite3.Connection, kind: type[P], trajectory_ids: Sequence[int]
) -> dict[int, list[P]]:
    query = (
        f"SELECT {schema.columns(kind)} FROM (SELECT value AS asked FROM json_each(?)) "
        f"JOIN {schema.TABLES[kind]} ON trajectory_id = asked"
    )
    found: dict[int, list[P]] = {}
    for values in connection.execute(query, (json.dumps(list(trajectory_ids)),)):
        row = schema.opened(kind, values)
        found.setdefault(row.trajectory_id, []).append(row)
    return found


@dataclass(frozen=True)
class Tokens:
    """Tokens and turns of one trajectory, assembled from their rows in the database.

    Attributes:
        segments: The tokens.
        chunks: The rows that the tokens come from, in order.
        complete: Whether no chunk is missing.
        turns: The turns, in the order of their numbers.
        turn_keys: Key of each turn's row, in the same order.
    """

    segments: tuple[Segment, ...]
    chunks: tuple[ChunkRow, ...]
    complete: bool
    turns: tuple[Turn, ...] = ()
    turn_keys: tuple[int, ...] = ()


def assemble(row: TrajectoryRow, parts: Parts) -> Tokens:
    """Assemble the tokens and turns of trajectory `row` from the rows in `parts`.

    Only chunks and turns of the trajectory's current attempt are used (a restart begins a new
    attempt). If a chunk is missing, all later chunks are ignored.
    """
    chunks = parts.chunks.get(row.trajectory_id, ())
    mine = sorted(
        (chunk for chunk in chunks if chunk.attempt == row.attempt), key=lambda chunk: chunk.seq
    )
    unbroken = [chunk for i, chunk in enumerate(mine) if chunk.seq == i]
    complete = len(unbroken) == len(mine) and len(unbroken) >= row.chunks
    segments = []
    for _, of_segment in itertools.groupby(unbroken, key=lambda chunk: chunk.segment):
        together = list(of_segment)
        first = together[0]
        blobs = [chunk.data for chunk in together]
        token_ids, logprobs, *more = unpacked(blobs, first.columns)
        version = PolicyVersion(first.lineage, first.number)
        written = (version, first.engine_id, bool(first.environment))
        segments.append(Segment(token_ids, logprobs, *written, tuple(more)))
    rows = [t for t in parts.turns.get(row.trajectory_id, ()) if t.attempt == row.attempt]
    rows.sort(key=lambda turn: turn.number)
    keys = tuple(turn.turn_id for turn in rows)
    return Tokens(tuple(segments), tuple(unbroken), complete, tuple(map(turn_of, rows)), keys)


def turn_of(row: TurnRow) -> Turn:
    """Return the `Turn` that a row of the table of turns describes."""
    return Turn(
        row.number,
        row.parent,
        row.segment,
        json.loads(row.messages),
        None if row.end is None else FinishReason(row.end),
        row.reward,
        None if row.answer is None else json.loads(row.answer),
        row.state,
    )


def read_tokens(connection: sqlite3.Connection, row: TrajectoryRow) -> Tokens:
    """Read the tokens and turns of trajectory `row` from the database.

    Raises:
        DamagedStore: The checksum of a row is wrong.
    """
    return assemble(row, read_parts(connection, [row.trajectory_id]))


def prompt_of(row: GroupRow) -> Prompt:
    """Return the `Prompt` that a row of the table of groups describes."""
    token_ids = np.frombuffer(row.token_ids, dtype="<i4").astype(np.int32)
    return Prompt(token_ids, row.task, json.loads(row.payload), row.priority)


def trajectory_of(
    row: TrajectoryRow,
    prompt: Prompt,
    segments: tuple[Segment, ...],
    turns: tuple[Turn, ...],
    batched_step: int | None,
) -> Trajectory:
    """Return the `Trajectory` that a row and its prompt, segments and turns describe.

    Args:
        row: Row of the trajectory.
        prompt: Prompt of the trajectory's group.
        segments: Tokens of the trajectory.
        turns: Turns of the trajectory, if it is an episode.
        batched_step: Step of the batch that consumed the trajectory on the lineage that the caller
            looks at; the result then has the state `batched`. None if no batch consumed it; the
            result then has the state of the row.
    """
    batched = batched_step is not None
    return Trajectory(
        trajectory_id=row.trajectory_id,
        group_id=row.group_id,
        prompt=prompt,
        state=TrajectoryState.BATCHED if batched else TrajectoryState(row.state),
        segments=segments,
        finish_reason=None if row.finish_reason is None else FinishReason(row.finish_reason),
        reward=row.reward,
        reward_detail=json.loads(row.reward_detail),
        batched_step=batched_step,
        drop_reason=None if batched or row.drop_reason is None else DropReason(row.drop_reason),
        turns=turns,
    )


@dataclass(frozen=True, eq=False)
class TrajectorySummary(Trajectory):
    """A trajectory for listings, without its prompt, segments and turns, but with their sizes.

    Attributes:
        tokens: Number of tokens after the prompt, including those of the environment.
        versions: The policy versions that generated tokens of the trajectory.
        turn_count: Number of turns; 0 for a trajectory that is not an episode.
    """

    tokens: int = 0
    versions: tuple[PolicyVersion, ...] = ()
    turn_count: int = 0


class StoreReader:
    """Reads a store without changing it, even while its run continues.

    It reads the database if this node can open it, else the replica (`note` then says so).
    """

    def __init__(self, path: Path) -> None:
        """Open the database of the store `path` for reading, or its replica if this node lacks it.

        Args:
            path: The store's name, RUN/trajectories.sqlite.

        Raises:
            UserError: The store does not exist, is on another node and has no replica, is damaged,
                or has another format.
        """
        found = location_of_reader(path)
        self._run_file, self._path, self.note = path, found.file, found.note
        with self._naming_damage():
            self._connection = schema.connect(
                found.file, read_only=True, immutable=found.is_replica
            )
            schema.checked_format(self._connection, found.file)

    def close(self) -> None:
        """Close the database file."""
        self._connection.close()

    @property
    def export_file(self) -> Path:
        """Path of the JSONL file to which compaction moves old trajectories from the database."""
        return schema.export_file(self._run_file)

    def at_one_moment(self) -> AbstractContextManager[None]:
        """Return a context in which all reads of this reader see the same state of the database.

        Transactions that the run commits meanwhile are not seen.
        """
        return at_one_moment(self._connection)

    def contains(self, trajectory_id: int) -> bool:
        """Return whether the database has this trajectory (an exported trajectory is not in it)."""
        query = f"SELECT 1 FROM trajectories WHERE trajectory_id = {int(trajectory_id)}"
        return bool(self._found(query))

    def exported(self) -> Exported:
        """Return the totals of what compaction has removed from the database.

        Raises:
            UserError: The database is damaged.
        """
        with self._naming_damage():
            return Exported.read(self._connection) or Exported()

    def content(self) -> StoreContent:
        """Return everything that the database contains at this moment, except chunks and turns.

        Raises:
            UserError: The database is damaged.
        """
        with self._naming_damage():
            return read_content(self._connection)

    def summaries(self, state: TrajectoryState | None = None) -> list[TrajectorySummary]:
        """Return a summary of every trajectory in the database, in ascending order of ids.

        If `state` is given, only trajectories in that state are returned. A trajectory is `batched`
        if it is consumed on the newest lineage.

        Raises:
            UserError: The database is damaged.
        """
        content = self.content()
        batched = self._batched_steps(content)
        sizes = self._sizes()
        query = "SELECT trajectory_id, attempt, count(*) FROM turns GROUP BY 1, 2"
        turns = {(number, attempt): count for number, attempt, count in self._found(query)}
        listed = []
        for row in content.trajectories.values():
            key = row.trajectory_id, row.attempt
            tokens, versions = sizes.get(key, (0, ()))
            public = trajectory_of(row, NO_PROMPT, (), (), batched.get(row.trajectory_id))
            if state is not None and public.state is not state:
                continue
            counts = {"tokens": tokens, "versions": versions, "turn_count": turns.get(key, 0)}
            listed.append(TrajectorySummary(**vars(public), **counts))
        return listed

    def trajectory(self, trajectory_id: int) -> Trajectory:
        """Return a trajectory of the database with its tokens and turns.

        Raises:
            UserError: The trajectory is not in the database (the message says why), or the database
                is damaged.
        """
        content = self.content()
        row = content.trajectories.get(trajectory_id)
        if row is None:
            raise UserError(
                f"trajectory {trajectory_id} is not in {self._path}: "
                f"{self._why_missing(trajectory_id, content)}"
            )
        with self._naming_damage():
            tokens = read_tokens(self._connection, row)
        batched = self._batched_steps(content).get(trajectory_id)
        prompt = prompt_of(content.groups[row.group_id])
        return trajectory_of(row, prompt, tokens.segments, tokens.turns, batched)

    def _why_missing(self, trajectory_id: int, content: StoreContent) -> str:
        if not 0 <= trajectory_id < content.counters.next_trajectory:
            return "no trajectory of this run has ever had that id"
        if content.exported.bytes:
            return f"compaction moved it to {self.export_file}, or it was lost with a damaged file"
        return "compaction removed it (store.export is none), or it was lost with a damaged file"

    @staticmethod
    def _batched_steps(content: StoreContent) -> Mapping[int, int]:
        if not content.tree:
            return {}
        return content.batched_steps(Consumption.at(content.tree, content.tree.newest))

    def _sizes(self) -> dict[tuple[int, int], tuple[int, tuple[PolicyVersion, ...]]]:
        """Return each trajectory's token count and policy versions, by (trajectory id, attempt).

        Tokens of the environment are counted. No token is read, only the sizes of the chunks.
        """
        found: dict[tuple[int, int], tuple[int, tuple[PolicyVersion, ...]]] = {}
        query = (
            "SELECT trajectory_id, attempt, lineage, number, environment, columns, "
            "sum(length(data)) FROM chunks GROUP BY 1, 2, 3, 4, 5, 6"
        )
        for trajectory_id, attempt, lineage, number, environment, more, size in self._found(query):
            tokens, versions = found.get((trajectory_id, attempt), (0, ()))
            if not environment and (by := PolicyVersion(lineage, number)) not in versions:
                versions = (*versions, by)
            found[trajectory_id, attempt] = tokens + size // token_bytes(more), versions
        return found

    def _found(self, query: str) -> list[Any]:
        with self._naming_damage():
            return self._connection.execute(query).fetchall()

    @contextmanager
    def _naming_damage(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, DamagedStore) as error:
            raise UserError(
                f"trajectory store {self._path} is damaged ({error}). Resume the run, which then "
                "continues from the store's replica"
            ) from error
