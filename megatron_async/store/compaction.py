"""Compaction: what is consumed for good leaves the database and becomes lines of a JSONL file.

Invariants
- A group is removed only when each of its trajectories is dropped, or consumed as seen from the
  current lineage, from the checkpoint that is `compact_after` checkpoints old, and from every
  checkpoint that can still be restored.
- A line is in the export file exactly when its trajectory is out of the database: lines are on disk
  before the removal is committed, and the length of the file is committed with the removal. What a
  crash leaves beyond that length is cut off at the next open.
- Neither commits nor the event loop wait for it: lines are read and written on a thread and a
  connection of their own; the writer's thread only removes, in pieces of milliseconds
  (`apply_removal`, `remove_parts`, `vacuum_pages`), between commits.
- No group is ever half there: its rows go together, with the length of its lines, and its chunks
  and turns after them, as many at once as a piece may hold. One without a trajectory is nobody's
  (ids are never used twice): what a crash leaves of them goes with the next compaction.
- One compaction at a time; its error is raised by the next `finish`, which everybody calls before
  the next one starts and before the store is closed.
- Every piece is limited in time, and so is `finish`. A thread that still writes lines after its
  limit keeps the store locked to its end: nobody else appends to the file meanwhile.
- What is in memory is forgotten after the removal is committed, never before.
"""

import asyncio
import json
import sqlite3
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import ComponentFailure
from megatron_async.files.disk import reason
from megatron_async.store import export as export
from megatron_async.store import schema as schema
from megatron_async.store.documents import Exported
from megatron_async.store.lineage import Consumption, LineageTree
from megatron_async.store.location import StoreLocation
from megatron_async.store.reader import consumed_by, read_group
from megatron_async.store.schema import BatchRow, DocumentRow, pack_ids, sealed, write_rows
from megatron_async.store.state import StoreState
from megatron_async.store.writer import StoreWriter
from megatron_async.trajectory.types import PolicyVersion

_PARTS_PER_REMOVAL = 2048  # about 3 ms; 20 when SQLite empties its log meanwhile
_PAGES_GIVEN_BACK = 256  # at once: about 4 ms
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """Groups that can go, in order; the batch that consumed each of their trajectories."""

    groups: tuple[int, ...] = ()
    consumed_by: Mapping[int, BatchRow] = field(default_factory=dict)
    batches_of: Mapping[int, Sequence[int]] = field(default_factory=dict)
    restorable: tuple[PolicyVersion, ...] = ()


@dataclass(frozen=True)
class Removal:
    """A transaction of compaction: groups that go, batches without them, the new tallies."""

    groups: tuple[int, ...]
    batches: tuple[BatchRow, ...]
    consumed_by: Mapping[int, BatchRow]
    exported: Exported


def plan(
    tree: LineageTree,
    lineage: int,
    batches: Sequence[BatchRow],
    groups: Mapping[int, range],
    dropped: Collection[int],
    kept: Sequence[PolicyVersion],
    oldest: PolicyVersion | None,
) -> Plan:
    """Plan what can be removed when `kept` can be restored (see the module's first invariant).

    A store that was replaced by an older database may have lost the lineage of a checkpoint. Such a
    checkpoint is left out: the store holds nothing of it.
    """
    if oldest is None:
        return Plan()
    kept = [checkpoint for checkpoint in kept if checkpoint.lineage in tree]
    places = [Consumption.at(tree, lineage)]
    places += [Consumption.at_checkpoint(tree, point) for point in [oldest, *kept]]
    here, *others = (consumed_by(batches, location) for location in places)
    for_good = {i: batch for i, batch in here.items() if all(i in other for other in others)}
    batches_of: dict[int, list[int]] = {}
    for batch in batches:
        for trajectory_id in batch.ids():
            batches_of.setdefault(trajectory_id, []).append(batch.id)
    removable = (
        group_id
        for group_id, ids in groups.items()
        if all(i in for_good or i in dropped for i in ids)
    )
    return Plan(tuple(removable), for_good, batches_of, tuple(kept))


def horizon(
    tree: LineageTree, lineage: int, checkpoints: Iterable[PolicyVersion], compact_after: int
) -> PolicyVersion | None:
    """The checkpoint on the current path after which `compact_after` - 1 newer ones exist."""
    here = Consumption.at(tree, lineage)
    on_path = {p.number: p for p in sorted(checkpoints) if here.reaches(p.lineage, p.number)}
    numbers = sorted(on_path, reverse=True)
    return on_path[numbers[compact_after - 1]] if len(numbers) >= compact_after else None


def removal(chosen: Sequence[int], whole: Plan, state: StoreState) -> Removal:
    """The transaction that takes the groups `chosen` out of the plan `whole`."""
    gone = {i for group_id in chosen for i in state.groups[group_id].trajectory_ids}
    consumed = {i: whole.consumed_by[i] for i in gone if i in whole.consumed_by}
    exported = state.exported
    reasons = Counter(exported.dropped)
    reasons.update(str(state.records[i].row.drop_reason) for i in gone if i not in consumed)
    touched = sorted({key for i in gone for key in whole.batches_of.get(i, ())})
    return Removal(
        groups=tuple(chosen),
        batches=tuple(
            state.batches[key]._replace(
                trajectory_ids=pack_ids(i for i in state.batches[key].ids() if i not in gone)
            )
            for key in touched
        ),
        consumed_by=consumed,
        exported=replace(
            exported,
            batched=exported.batched + len(consumed),
            dropped=dict(reasons),
            groups=exported.with_groups(chosen),
            at=list(whole.restorable) if consumed else exported.at,
        ),
    )


def apply_removal(connection: sqlite3.Connection, change: Removal) -> None:
    """Remove all but the chunks and turns, in one transaction. Raises DamagedStore."""
    with connection:  # commits, or rolls back what an error has stopped
        connection.execute("BEGIN IMMEDIATE")
        for group_id in change.groups:
            ids = read_group(connection, group_id).trajectory_ids
            bounds = (ids[0], ids[-1])
            connection.execute(
                "DELETE FROM trajectories WHERE trajectory_id BETWEEN ? AND ?", bounds
            )
            connection.execute("DELETE FROM groups WHERE group_id = ?", (group_id,))
        write_rows(connection, BatchRow, [sealed(batch) for batch in change.batches])
        write_rows(connection, DocumentRow, [sealed(change.exported.to_row())])


def orphaned_keys(file: Path, kind: schema.Kind) -> list[int]:
    """Keys of chunks or turns whose trajectories are gone, in the order of their pages."""
    table = schema.TABLES[kind]
    with closing(schema.connect(file, read_only=True)) as connection:
        found = connection.execute(
            f"SELECT {schema.PARTS[kind]} FROM {table} INDEXED BY {table}_of "  # else: all tokens
            "WHERE trajectory_id NOT IN (SELECT trajectory_id FROM trajectories)"
        )
        return sorted(row[0] for row in found)


def remove_parts(connection: sqlite3.Connection, kind: schema.Kind, keys: Sequence[int]) -> None:
    """Remove chunks or turns, in one transaction."""
    rows = f"{schema.TABLES[kind]} WHERE {schema.PARTS[kind]}"
    chosen = "SELECT value FROM json_each(?)"
    connection.execute(f"DELETE FROM {rows} IN ({chosen})", (json.dumps(keys),))


def vacuum_pages(connection: sqlite3.Connection) -> bool:
    """Some of the free pages leave the file; False when there are none left."""
    # Not `execute`: it makes one step of a statement that has no columns, and that is one page.
    connection.executescript(f"PRAGMA incremental_vacuum({_PAGES_GIVEN_BACK})")
    return bool(connection.execute("PRAGMA freelist_count").fetchone()[0])


class Compactor:
    """Takes out of a store's state and file what no restorable checkpoint needs."""

    def __init__(
        self, location: StoreLocation, state: StoreState, writer: StoreWriter, settings: StoreConfig
    ) -> None:
        self._location, self._state, self._writer = location, state, writer
        self._after = settings.compact_after_checkpoints
        self._file = location.export_file if settings.export == "jsonl" else None
        self._task: asyncio.Task[None] | None = None

    def start(self, kept: Sequence[PolicyVersion]) -> None:
        """Begin, with the checkpoints that can still be restored."""
        self._task = asyncio.create_task(self._compact(kept))

    async def finish(self) -> None:
        """Wait for the one that runs, if any. Raises what stopped it."""
        if self._task is not None:
            task, self._task = self._task, None
            try:
                await task
            except sqlite3.Error as error:
                raise ComponentFailure(
                    f"trajectory store {self._location.file} cannot be compacted: {reason(error)}"
                ) from error

    async def _compact(self, kept: Sequence[PolicyVersion]) -> None:
        state = self._state
        checkpoints = list(state.checkpoints)
        batches = list(state.batches.values())
        groups = {group_id: group.trajectory_ids for group_id, group in state.groups.items()}
        dropped = {i for i, record in state.records.items() if record.row.drop_reason is not None}

        def planned() -> Plan:
            oldest = horizon(state.tree, state.lineage, checkpoints, self._after)
            return plan(state.tree, state.lineage, batches, groups, dropped, kept, oldest)

        await self._writer.committed()  # lines are read from the file: it must have these drops
        whole = await asyncio.to_thread(planned)
        for piece in self._pieces(whole.groups):
            change = removal(piece, whole, state)
            if self._file is not None:
                length = await self._write_lines(change, self._file)
                change = replace(change, exported=replace(change.exported, bytes=length))
            await self._run(partial(apply_removal, change=change))
            state.exported = change.exported
            state.batches.update((batch.id, batch) for batch in change.batches)
            for group_id in change.groups:
                for trajectory_id in state.groups.pop(group_id).trajectory_ids:
                    del state.records[trajectory_id]
        state.forget_emptied_batches()
        for kind in schema.PARTS:
            find = partial(orphaned_keys, self._location.file, kind)
            left = await self._beside(find, "compaction read nothing")
            for start in range(0, len(left), _PARTS_PER_REMOVAL):
                keys = left[start : start + _PARTS_PER_REMOVAL]
                await self._run(partial(remove_parts, kind=kind, keys=keys))
        while await self._run(vacuum_pages):
            pass

    def _pieces(self, groups: Sequence[int]) -> Iterator[list[int]]:
        """Groups that are removed together, at once with their lines."""
        piece: list[int] = []
        rows = 0
        for group_id in groups:
            piece.append(group_id)
            members = self._state.groups[group_id].trajectory_ids
            rows += sum(1 + self._state.records[i].row.chunks for i in members)
            if rows >= _PARTS_PER_REMOVAL:
                yield piece
                piece, rows = [], 0
        if piece:
            yield piece

    async def _write_lines(self, change: Removal, file: Path) -> int:
        lock = self._writer.share_lock()

        def write() -> int:
            with (
                closing(lock),
                closing(schema.connect(self._location.file, read_only=True)) as connection,
            ):
                return export.write_lines(
                    connection, change.groups, change.consumed_by, file, change.exported.bytes
                )

        return await self._beside(write, f"export {file} took no line")

    async def _beside(self, work: Callable[[], T], missed: str) -> T:
        """Work on a thread; at the limit raises ComponentFailure with what it `missed`."""
        try:
            async with asyncio.timeout(limit := self._writer.stall_seconds):
                return await asyncio.to_thread(work)
        except TimeoutError as error:
            raise ComponentFailure(f"{missed} for {limit:g} s") from error

    async def _run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run on the writer's thread; what waits to be committed goes first."""
        return await self._writer.wait(self._writer.run(job))
