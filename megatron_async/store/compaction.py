"""Compaction: what is consumed for good leaves the database and becomes lines of a JSONL file.

Invariants
- A group is removed only when each of its trajectories is dropped, or consumed as seen from the
  current line, from the checkpoint that is `compact_after` checkpoints old, and from every
  checkpoint that can still be restored.
- A line is in the export file exactly when its trajectory is out of the database: lines are on disk
  before the removal is committed, and the length of the file is committed with the removal. What a
  crash leaves beyond that length is cut off at the next open.
- Lines are read and written on a thread and a connection of their own; the writer's thread only
  removes, in pieces of milliseconds (`apply_removal`, `give_back_pages`), between commits.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_async.disk import writing
from megatron_async.store import schema as schema
from megatron_async.store.lineage import Consumption, LineTree, reached
from megatron_async.store.reader import Exported, assemble, read_chunks
from megatron_async.store.schema import BatchRow, GroupRow, TrajectoryRow, pack_ids
from megatron_async.trajectory.types import PolicyVersion, Segment

_PAGES_GIVEN_BACK = 256  # at once: about 4 ms


@dataclass(frozen=True)
class Situation:
    """Material of a plan; `dropped` gives the reason of each dropped trajectory."""

    tree: LineTree
    lineage: int
    batches: Sequence[BatchRow]
    checkpoints: Sequence[PolicyVersion]
    groups: Mapping[int, range]
    dropped: Mapping[int, str]


@dataclass(frozen=True)
class Plan:
    """Groups that can go, in order; the batch that consumed each of their trajectories."""

    groups: tuple[int, ...] = ()
    consumed_by: Mapping[int, PolicyVersion] = field(default_factory=dict)
    batches_of: Mapping[int, Sequence[int]] = field(default_factory=dict)
    restorable: tuple[PolicyVersion, ...] = ()


@dataclass(frozen=True)
class Removal:
    """A transaction of compaction: groups that go, batches without them, the new tallies."""

    groups: tuple[int, ...]
    batches: tuple[BatchRow, ...]
    consumed_by: Mapping[int, PolicyVersion]
    exported: Exported


def plan(now: Situation, kept: Sequence[int | PolicyVersion], compact_after: int) -> Plan:
    """Plan what can be removed when `kept` can be restored (see the module's first invariant)."""
    oldest = horizon(now.tree, now.lineage, now.checkpoints, compact_after)
    if oldest is None:
        return Plan()
    points = restorable(now.tree, kept, now.batches)
    full = [(batch, batch.ids()) for batch in now.batches if batch.trajectory_ids]
    places = [Consumption.at(now.tree, now.lineage)]
    places += [Consumption.at_checkpoint(now.tree, point) for point in [oldest, *points]]
    consumed_by: dict[int, PolicyVersion] = {}
    for i, place in enumerate(places):
        found = {
            trajectory_id: PolicyVersion(batch.lineage, batch.step)
            for batch, ids in full
            if place.holds(batch.lineage, batch.step)
            for trajectory_id in ids
        }
        consumed_by = found if i == 0 else {k: v for k, v in consumed_by.items() if k in found}
    batches_of: dict[int, list[int]] = {}
    for batch, ids in full:
        for trajectory_id in ids:
            batches_of.setdefault(trajectory_id, []).append(batch.id)
    removable = (
        group_id
        for group_id, ids in now.groups.items()
        if all(i in consumed_by or i in now.dropped for i in ids)
    )
    return Plan(tuple(removable), consumed_by, batches_of, tuple(points))


def horizon(
    tree: LineTree, lineage: int, checkpoints: Iterable[PolicyVersion], compact_after: int
) -> PolicyVersion | None:
    """The checkpoint on the current path after which `compact_after` - 1 newer ones exist."""
    path = tree.path(lineage)
    on_path = {
        point.number: point
        for point in sorted(checkpoints)
        if point.lineage in path and _within(point.number, path[point.lineage])
    }
    numbers = sorted(on_path, reverse=True)
    return on_path[numbers[compact_after - 1]] if len(numbers) >= compact_after else None


def restorable(
    tree: LineTree, kept: Sequence[int | PolicyVersion], batches: Sequence[BatchRow]
) -> list[PolicyVersion]:
    """Checkpoints that may be restored. A bare step stands for every line that reached it."""
    numbers = reached(tree, ((batch.lineage, batch.step) for batch in batches))
    points: list[PolicyVersion] = []
    for point in kept:
        if isinstance(point, PolicyVersion):
            points.append(point)
            continue
        points += [
            PolicyVersion(line.lineage, point)
            for line in tree.lines()
            if line.branch_step <= point <= numbers[line.lineage]
        ]
    return sorted(set(points))


def is_restorable(tree: LineTree, checkpoint: PolicyVersion, exported: Exported) -> bool:
    """Return whether nothing that was removed would be needed from this checkpoint on."""
    if not exported.at:
        return True
    limits = Consumption.at_checkpoint(tree, checkpoint).limits
    return any(
        lineage in limits and _within(number, limits[lineage]) for lineage, number in exported.at
    )


def removal(
    chosen: Sequence[int],
    whole: Plan,
    *,
    groups: Mapping[int, range],
    batches: Mapping[int, BatchRow],
    dropped: Mapping[int, str],
    exported: Exported,
) -> Removal:
    """The transaction that takes the groups `chosen` out of the plan `whole`."""
    gone = {i for group_id in chosen for i in groups[group_id]}
    consumed_by = {i: whole.consumed_by[i] for i in gone if i in whole.consumed_by}
    reasons = Counter(exported.dropped)
    reasons.update(dropped[i] for i in gone if i not in consumed_by)
    touched = sorted({key for i in gone for key in whole.batches_of.get(i, ())})
    return Removal(
        groups=tuple(chosen),
        batches=tuple(
            batches[key]._replace(
                trajectory_ids=pack_ids(i for i in batches[key].ids() if i not in gone)
            )
            for key in touched
        ),
        consumed_by=consumed_by,
        exported=replace(
            exported,
            batched=exported.batched + len(consumed_by),
            dropped=dict(reasons),
            groups=exported.with_groups(chosen),
            at=[(p.lineage, p.number) for p in whole.restorable] if consumed_by else exported.at,
        ),
    )


def write_lines(connection: sqlite3.Connection, change: Removal, export_file: Path) -> int:
    """Append the lines of what `change` removes, and force them to disk; returns the file's length.

    What an append that failed before has left there is cut off first. Raises CannotWrite,
    DamagedStore.
    """
    lines = (
        line
        for group_id in change.groups
        for line in _lines(connection, group_id, change.consumed_by)
    )
    with writing(export_file):
        cut_uncommitted(export_file, change.exported.bytes)
        return append_lines(export_file, lines)


def apply_removal(connection: sqlite3.Connection, change: Removal) -> None:
    """Remove, in one transaction. Raises DamagedStore."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for group_id in change.groups:
            group = _group(connection, group_id)
            ids = (group.first_trajectory, group.first_trajectory + group.size - 1)
            connection.execute("DELETE FROM chunks WHERE trajectory_id BETWEEN ? AND ?", ids)
            connection.execute("DELETE FROM trajectories WHERE trajectory_id BETWEEN ? AND ?", ids)
            connection.execute("DELETE FROM groups WHERE group_id = ?", (group_id,))
        for batch in change.batches:
            _replace(connection, "batches", batch)
        _replace(connection, "document", change.exported.to_row())
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def give_back_pages(connection: sqlite3.Connection) -> bool:
    """Some of the free pages leave the file; False when there are none left."""
    # Not `execute`: it makes one step of a statement that has no columns, and that is one page.
    connection.executescript(f"PRAGMA incremental_vacuum({_PAGES_GIVEN_BACK})")
    return bool(connection.execute("PRAGMA freelist_count").fetchone()[0])


def append_lines(path: Path, lines: Iterable[bytes]) -> int:
    """Append, force to disk; returns the length of the file. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.writelines(line + b"\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def cut_uncommitted(path: Path, length: int) -> None:
    """Remove lines whose removal from the database was never committed. Raises OSError."""
    if path.exists() and path.stat().st_size > length:
        os.truncate(path, length)


def _within(number: int, limit: int | None) -> bool:
    return limit is None or number <= limit


def _replace(connection: sqlite3.Connection, table: str, values: schema.Row) -> None:
    row = schema.sealed(table, values)
    connection.execute(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def _group(connection: sqlite3.Connection, group_id: int) -> GroupRow:
    found = connection.execute("SELECT * FROM groups WHERE group_id = ?", (group_id,)).fetchone()
    if found is None:
        raise schema.DamagedStore(f"group {group_id} is missing")
    return GroupRow.of(schema.opened("groups", found))


def _lines(
    connection: sqlite3.Connection, group_id: int, consumed_by: Mapping[int, PolicyVersion]
) -> Iterator[bytes]:
    group = _group(connection, group_id)
    found = connection.execute(
        "SELECT * FROM trajectories WHERE trajectory_id BETWEEN ? AND ? ORDER BY trajectory_id",
        (group.first_trajectory, group.first_trajectory + group.size - 1),
    )
    for values in found.fetchall():
        row = TrajectoryRow(*schema.opened("trajectories", values))  # type: ignore[arg-type]
        chunks = read_chunks(connection, [row.trajectory_id])
        tokens = assemble(row, chunks.get(row.trajectory_id, ()))
        batch = consumed_by.get(row.trajectory_id)
        line = {
            "trajectory_id": row.trajectory_id,
            "group_id": row.group_id,
            "task": group.task,
            "prompt": {
                "token_ids": np.frombuffer(group.token_ids, dtype="<i4"),
                "payload": orjson.Fragment(group.payload),
                "priority": group.priority,
            },
            "segments": [_segment(segment) for segment in tokens.segments],
            "complete": tokens.complete,
            "finish_reason": row.finish_reason,
            "reward": row.reward,
            "reward_detail": orjson.Fragment(row.reward_detail),
            "batch": None if batch is None else {"lineage": batch[0], "step": batch[1]},
            "drop_reason": row.drop_reason if batch is None else None,
        }
        yield orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)


def _segment(segment: Segment) -> dict[str, Any]:
    logprobs: Any = segment.logprobs
    if not np.isfinite(logprobs).all():  # JSON has no infinity, Python's dialect of it has
        logprobs = orjson.Fragment(json.dumps(logprobs.tolist()))
    return {
        "version": str(segment.version),
        "engine_id": segment.engine_id,
        "from_environment": segment.from_environment,
        "token_ids": segment.token_ids,
        "logprobs": logprobs,
    }
