"""Reading a store: all rows checked, tokens put together, what is consumed derived.

Used when a store is opened and by whoever looks at one while it runs (`StoreReader`: any number of
them; on another node than the writer's they read the replica).

Invariants
- A row whose CRC is wrong raises DamagedStore; nothing unchecked leaves this module.
- A trajectory's tokens are the longest unbroken sequence of chunks from its first one. If its row
  counts more chunks than that, it was damaged and is marked so (`complete` is false).
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
    """Everything in a store but the tokens."""

    position: int
    counters: Counters
    exported: Exported
    tree: LineageTree
    checkpoints: list[PolicyVersion]
    batches: list[BatchRow]
    groups: dict[int, GroupRow]
    trajectories: dict[int, TrajectoryRow]

    def batched_steps(self, consumption: Consumption) -> dict[int, int]:
        """Trajectory -> the step whose batch consumed it, as seen from one place."""
        return {i: batch.step for i, batch in consumed_by(self.batches, consumption).items()}


def consumed_by(batches: Iterable[BatchRow], location: Consumption) -> dict[int, BatchRow]:
    """Trajectory -> the batch that consumed it, as seen from one place."""
    return {
        trajectory_id: batch
        for batch in batches
        if location.holds(batch.lineage, batch.step)
        for trajectory_id in batch.ids()
    }


@contextmanager
def at_one_moment(connection: sqlite3.Connection) -> Iterator[None]:
    """All reads inside see one state of the file; inside another one it is part of that."""
    if connection.in_transaction:
        yield
        return
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


def read_position(connection: sqlite3.Connection) -> int:
    """Transactions ever committed. Raises DamagedStore or sqlite3.DatabaseError."""
    return max((row.position for row in read_rows(connection, ProgressRow)), default=0)


def read_content(connection: sqlite3.Connection) -> StoreContent:
    """Raises DamagedStore or sqlite3.DatabaseError when anything is not what was written."""
    with at_one_moment(connection):
        tree = LineageTree(read_rows(connection, Lineage))
        counters = Counters.read(connection)
        if counters is None and tree:
            raise DamagedStore("the counters are missing")
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
        raise DamagedStore(f"trajectory {min(odd)} or its group is missing")
    return content


def newest_turn(connection: sqlite3.Connection) -> int:
    """The largest key of a turn; 0 where there is none."""
    return int(connection.execute("SELECT ifnull(max(turn_id), 0) FROM turns").fetchone()[0])


def read_group(connection: sqlite3.Connection, group_id: int) -> GroupRow:
    """Read a group's row. Raises DamagedStore when it is not there."""
    for row in read_rows(connection, GroupRow, "group_id = ?", group_id):
        return row
    raise DamagedStore(f"group {group_id} is missing")


@dataclass
class Parts:
    """Chunks and turns of trajectories, of all attempts."""

    chunks: dict[int, list[ChunkRow]]
    turns: dict[int, list[TurnRow]]


def read_parts(connection: sqlite3.Connection, trajectory_ids: Sequence[int]) -> Parts:
    """Every chunk and turn of these trajectories, checked. Raises DamagedStore."""
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
    """A trajectory's tokens and turns as they were found, and the chunks they are from, in order.

    `turn_keys`: those of the turns' rows.
    """

    segments: tuple[Segment, ...]
    chunks: tuple[ChunkRow, ...]
    complete: bool
    turns: tuple[Turn, ...] = ()
    turn_keys: tuple[int, ...] = ()


def assemble(row: TrajectoryRow, parts: Parts) -> Tokens:
    """Segments from the unbroken chunks of the row's attempt, and its turns."""
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
    """The public form."""
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
    """Read a trajectory's tokens and turns. Raises DamagedStore."""
    return assemble(row, read_parts(connection, [row.trajectory_id]))


def prompt_of(row: GroupRow) -> Prompt:
    """The prompt that a group row holds."""
    token_ids = np.frombuffer(row.token_ids, dtype="<i4").astype(np.int32)
    return Prompt(token_ids, row.task, json.loads(row.payload), row.priority)


def trajectory_of(
    row: TrajectoryRow,
    prompt: Prompt,
    segments: tuple[Segment, ...],
    turns: tuple[Turn, ...],
    batched_step: int | None,
) -> Trajectory:
    """The public form; a trajectory consumed on the lineage that is looked at is `batched`."""
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
    """A line of a listing, without prompt, segments and turns.

    `tokens` counts those of the response, `turn_count` the turns of an episode.
    """

    tokens: int = 0
    versions: tuple[PolicyVersion, ...] = ()
    turn_count: int = 0


class StoreReader:
    """Looks at a store without changing it, also while its run goes on."""

    def __init__(self, path: Path) -> None:
        """`path` is RUN/trajectories.sqlite. Raises UserError when there is no readable store."""
        found = location_of_reader(path)
        self._run_file, self._path, self.note = path, found.file, found.note
        with self._naming_damage():
            self._connection = schema.connect(
                found.file, read_only=True, immutable=found.is_replica
            )
            schema.checked_format(self._connection, found.file)

    def close(self) -> None:
        """Release the file."""
        self._connection.close()

    @property
    def export_file(self) -> Path:
        """Return the file in which compaction puts what it takes out; see `export`."""
        return schema.export_file(self._run_file)

    def at_one_moment(self) -> AbstractContextManager[None]:
        """Read what belongs together inside, whatever the run writes meanwhile."""
        return at_one_moment(self._connection)

    def holds(self, trajectory_id: int) -> bool:
        """Return whether this trajectory is in the store now."""
        query = f"SELECT 1 FROM trajectories WHERE trajectory_id = {int(trajectory_id)}"
        return bool(self._found(query))

    def exported(self) -> Exported:
        """Return what compaction has taken out by now. Raises UserError for a damaged file."""
        with self._naming_damage():
            return Exported.read(self._connection) or Exported()

    def content(self) -> StoreContent:
        """Everything but tokens, at one moment. Raises UserError for a damaged file."""
        with self._naming_damage():
            return read_content(self._connection)

    def summaries(self, state: TrajectoryState | None = None) -> list[TrajectorySummary]:
        """All trajectories (of one state) by id. Raises UserError for a damaged file."""
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
        """Return a trajectory with its tokens. Raises UserError when it is not in the store."""
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
            return "there was never one of that id"
        if content.exported.bytes:
            return f"compaction has moved it to {self.export_file}, or it was lost by damage"
        return "compaction has removed it (store.export is none), or it was lost by damage"

    @staticmethod
    def _batched_steps(content: StoreContent) -> Mapping[int, int]:
        if not content.tree:
            return {}
        return content.batched_steps(Consumption.at(content.tree, content.tree.newest))

    def _sizes(self) -> dict[tuple[int, int], tuple[int, tuple[PolicyVersion, ...]]]:
        """(trajectory, attempt) -> response tokens and policy versions, without reading tokens."""
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
                f"trajectory store {self._path} is damaged ({error}); resuming the run goes on "
                "from its replica"
            ) from error
