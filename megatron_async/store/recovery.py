"""Checking a store's file when it is opened, and making a new one out of a damaged one.

Invariants
- The damaged file stays beside the new one, under its name with `.damaged-N`, and so does its log.
- The new file holds only rows that are what was written (CRC), of groups whose prompt is known.
  A trajectory whose own row is lost starts again from its prompt; one whose chunks have a gap is
  cut there when it is read (`reader.assemble`).
- A crash during the salvage loses nothing: the new file gets the old one's name last.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_async.store import schema as schema
from megatron_async.store.carve import Pages, carve
from megatron_async.store.lineage import Line, LineTree
from megatron_async.store.reader import (
    Counters,
    Exported,
    StoreContent,
    read_chunks,
    read_content,
)
from megatron_async.store.schema import (
    BatchRow,
    ChunkRow,
    DamagedStore,
    GroupRow,
    Row,
    TrajectoryRow,
)
from megatron_async.store.writer import insert_chunks, replace_statement
from megatron_async.trajectory.types import TrajectoryState

_ID_GAP = 1_000_000  # ids left out when it is not known which have been given


@dataclass(frozen=True)
class Recovery:
    """What was wrong with a file and what became of it; `sentence` says it to a person.

    `behind`: the newest transactions are missing, so that what was found may be an older state.
    """

    sentence: str
    damaged_file: Path
    behind: bool
    lost_trajectories: int
    restarted_trajectories: int
    cut_trajectories: int = 0
    set_aside_trajectories: int = 0


def read_store(path: Path) -> StoreContent:
    """Check the file (made if there is none) and read all but tokens.

    Raises DamagedStore or sqlite3.DatabaseError for a damaged file, UserError for a foreign one.
    """
    _finish_interrupted_salvage(path)
    if path.exists() and 0 < path.stat().st_size < schema.PAGE_BYTES:
        raise DamagedStore("it ends within its first page")  # SQLite would take it for a new one
    connection = schema.connect(path)
    try:
        schema.check_identity(connection, path)
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise DamagedStore(" ".join(str(verdict).split()))
        schema.bring_up_to_date(connection)
        schema.create_tables(connection)
        return read_content(connection)
    finally:
        connection.close()


def read_tokens(path: Path, trajectory_ids: Sequence[int]) -> Mapping[int, list[ChunkRow]]:
    """Chunks of these trajectories. Raises DamagedStore or sqlite3.DatabaseError."""
    connection = schema.connect(path)
    try:
        return read_chunks(connection, trajectory_ids)
    finally:
        connection.close()


def is_damage(error: Exception) -> bool:
    """Whether an error means that the file's content is wrong (and not, say, that it is locked)."""
    if isinstance(error, DamagedStore):
        return True
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or code in (
        sqlite3.SQLITE_IOERR_SHORT_READ,
        sqlite3.SQLITE_IOERR_CORRUPTFS,
    )


def salvage(path: Path, reason: str, position: int) -> Recovery:
    """Put a new file with all that is intact in the place of `path`. Raises OSError.

    The new file's position is at least `position`, that of the checkpoint it is opened for.
    """
    pages = Pages(path, _wal(path))
    try:
        found = _collect(pages)
    finally:
        pages.close()
    restarted = found.complete_groups()
    lost = found.lost()
    found.counters.lost_trajectories += lost
    behind = found.position < position
    found.position = max(found.position, position)
    ready = path.with_name(path.name + ".salvaged")
    _write(ready, found)
    damaged = _move_away(path)
    ready.rename(path)
    sentence = (
        f"trajectory store {path} was damaged ({reason}): {len(found.trajectories)} trajectories "
        f"were recovered, {restarted} of them start again from their prompt, {lost} are lost; "
        f"the damaged file is kept as {damaged}"
    )
    return Recovery(sentence, damaged, behind, lost, restarted)


# ---------------------------------------------------------------- what is found


@dataclass
class _Found:
    position: int = 0
    counters: Counters = field(default_factory=Counters)
    counters_known: bool = False
    exported: Exported = field(default_factory=Exported)
    lines: dict[int, Line] = field(default_factory=dict)
    checkpoints: dict[int, Row] = field(default_factory=dict)
    batches: dict[int, BatchRow] = field(default_factory=dict)
    groups: dict[int, GroupRow] = field(default_factory=dict)
    trajectories: dict[int, TrajectoryRow] = field(default_factory=dict)
    chunks: dict[tuple[int, int, int], tuple[int, ChunkRow]] = field(default_factory=dict)

    def take(self, table: str, key: int, row: Row) -> None:
        """Keep a row, or the newer one of two that have the same key."""
        match table:
            case "progress":
                self.position = max(self.position, int(str(row[1])))
            case "document" if key == 1:
                counters = Counters.from_json(str(row[1]))
                self.counters_known = True
                if counters.next_group >= self.counters.next_group:
                    self.counters = counters
            case "document":
                exported = Exported.from_json(str(row[1]))
                if exported.batched >= self.exported.batched:
                    self.exported = exported
            case "lines":
                line = Line(*row)  # type: ignore[arg-type]
                self.lines[line.lineage] = line
            case "checkpoints":
                self.checkpoints[key] = row
            case "batches":
                batch = BatchRow(*row)  # type: ignore[arg-type]
                known = self.batches.get(key)
                if known is None or len(batch.trajectory_ids) < len(known.trajectory_ids):
                    self.batches[key] = batch
            case "groups":
                self.groups[key] = GroupRow.of(row)
            case "trajectories":
                trajectory = TrajectoryRow(*row)  # type: ignore[arg-type]
                old = self.trajectories.get(key)
                if old is None or trajectory.revision >= old.revision:
                    self.trajectories[key] = trajectory
            case "chunks":
                chunk = ChunkRow(*row)  # type: ignore[arg-type]
                place = chunk.trajectory_id, chunk.attempt, chunk.seq
                if place not in self.chunks or self.chunks[place][0] < key:
                    self.chunks[place] = key, chunk

    def complete_groups(self) -> int:
        """Leave out what has no prompt or was exported; give what has no row a new start.

        Returns the number of trajectories that start again.
        """
        attempts: dict[int, int] = {}
        for trajectory_id, attempt, _ in self.chunks:
            attempts[trajectory_id] = max(attempt, attempts.get(trajectory_id, 0))
        self.groups = {k: g for k, g in self.groups.items() if not self.exported.holds(k)}
        kept: dict[int, TrajectoryRow] = {}
        restarted = 0
        for group in self.groups.values():
            first = group.first_trajectory
            for trajectory_id in range(first, first + group.size):
                row = self.trajectories.get(trajectory_id)
                if row is None:
                    row = _fresh(trajectory_id, group.group_id, attempts.get(trajectory_id, -1) + 1)
                    restarted += 1
                kept[trajectory_id] = row
        if not self.counters_known:
            batched = [i for batch in self.batches.values() for i in batch.ids()]
            self.counters.next_group = _ID_GAP + max(self.groups, default=0)
            self.counters.next_trajectory = _ID_GAP + max(
                [0, *self.trajectories, *attempts, *batched]
            )
        self.trajectories = kept
        self.chunks = {
            place: found
            for place, found in self.chunks.items()
            if place[0] in kept and kept[place[0]].attempt == place[1]
        }
        for lineage, parent, branch_step in self.counters.lines:
            self.lines.setdefault(lineage, Line(lineage, parent, branch_step))
        return restarted

    def lost(self) -> int:
        """Trajectories of which nothing was found; those that were admitted, less all known."""
        if not self.counters_known:
            return 0
        exported = self.exported.batched + sum(self.exported.dropped.values())
        known = len(self.trajectories) + exported + self.counters.lost_trajectories
        return max(0, self.counters.next_trajectory - known)

    def tree(self) -> LineTree:
        """Lines whose ancestors are known too."""
        known: dict[int, Line] = {}
        for line in sorted(self.lines.values(), key=lambda line: line.lineage):
            if line.parent is None or line.parent in known:
                known[line.lineage] = line
        return LineTree(known.values())


def _collect(pages: Pages) -> _Found:
    found = _Found()
    for table, key, row in carve(pages):
        found.take(table, key, row)
    return found


def _fresh(trajectory_id: int, group_id: int, attempt: int) -> TrajectoryRow:
    state = TrajectoryState.PENDING.value
    return TrajectoryRow(trajectory_id, group_id, 0, attempt, 0, state, None, None, "{}", None)


# ---------------------------------------------------------------- files


def _write(path: Path, found: _Found) -> None:
    """A complete new store at `path`, on disk."""
    temporary = path.with_name(path.name + ".part")
    for leftover in (temporary, _wal(temporary), _shm(temporary)):
        leftover.unlink(missing_ok=True)
    connection = schema.connect(temporary)
    try:
        schema.create_tables(connection)
        connection.execute("BEGIN")
        rows: list[tuple[str, Row]] = [("progress", (1, found.position + 1))]
        rows += [("document", found.counters.to_row()), ("document", found.exported.to_row())]
        rows += [
            ("lines", (line.lineage, line.parent, line.branch_step))
            for line in found.tree().lines()
        ]
        rows += [("checkpoints", row) for row in found.checkpoints.values()]
        rows += [("batches", row) for row in found.batches.values()]
        rows += [("groups", row) for row in found.groups.values()]
        rows += [("trajectories", row) for row in found.trajectories.values()]
        for table, row in rows:
            connection.execute(replace_statement(table), schema.sealed(table, row))
        in_order = sorted(found.chunks.values(), key=lambda keyed: keyed[0])
        insert_chunks(connection, [schema.sealed("chunks", chunk) for _, chunk in in_order])
        connection.execute("COMMIT")
    finally:
        connection.close()
    descriptor = os.open(temporary, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.rename(path)


def _move_away(path: Path) -> Path:
    """Give the damaged file (and its log) a name of its own; returns it."""
    number = 1
    while (target := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    _shm(path).unlink(missing_ok=True)
    if _wal(path).exists():
        _wal(path).rename(_wal(target))
    if path.exists():
        path.rename(target)
    return target


def _finish_interrupted_salvage(path: Path) -> None:
    """A salvage that was killed before its last rename: the new file is complete, use it."""
    ready = path.with_name(path.name + ".salvaged")
    if not ready.exists():
        return
    if path.exists():
        ready.unlink()  # the old file is still in its place; it will be salvaged again
    else:
        ready.rename(path)


def _wal(path: Path) -> Path:
    return path.with_name(path.name + "-wal")


def _shm(path: Path) -> Path:
    return path.with_name(path.name + "-shm")
