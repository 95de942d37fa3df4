"""Provides `Compactor`, which moves groups from the store's database to the export file.

Only groups that no restorable checkpoint needs are moved. The export file is a JSONL file with one
line for each removed trajectory (see `export`); `store.export: none` removes groups without it.

Invariants
- A trajectory is consumed at a policy version if the weights of that version were trained on its
  batch. A group is removed only when each of its trajectories is either dropped, or consumed at all
  of these versions: the newest one of the current lineage, the checkpoint that is
  `compact_after_checkpoints` checkpoints old, and every checkpoint that can still be restored.
- A trajectory has a line in the export file exactly when it is no longer in the database: lines are
  on disk before the removal is committed, and the length of the file is committed in the same
  transaction as the removal. Lines beyond that length, which a crash may leave, are cut off the
  next time that the store is opened.
- Neither commits nor the event loop wait for compaction: lines are read and written on a separate
  thread with a separate connection. The writer thread only removes rows, between commits and in
  jobs of a few milliseconds each (`apply_removal`, `delete_chunks_or_turns`, `vacuum_pages`).
- A group is never removed partially: the rows of the group and of its trajectories are deleted in
  one transaction, which also records the length of the export file. Chunks and turns are deleted
  after that, a limited number at a time. A crash may leave some of them without a trajectory.
  Chunks and turns can never be assigned to another trajectory, since ids are never used twice, and
  the next compaction deletes them.
- Only one compaction runs at a time. If it fails, the next call of `finish` raises its error.
  `finish` is always called before the next compaction starts and before the store is closed.
- Every wait for the disk or for another thread that uses files has a time limit, so `finish`
  cannot wait forever. A thread that still writes lines after its limit keeps the store locked until
  it ends, so that no other process appends to the file.
- Records in memory are deleted only after the removal of their rows is committed.
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
from megatron_async.store.schema import BatchRow, DocumentRow, pack_ids, with_checksum, write_rows
from megatron_async.store.state import StoreState
from megatron_async.store.writer import StoreWriter
from megatron_async.trajectory.types import PolicyVersion

# The limit keeps each deletion short, because commits wait for it. Deleting this many chunks takes
# about 3 ms, or 20 ms if SQLite moves its write-ahead log into the database during the commit.
_PARTS_PER_REMOVAL = 2048
_PAGES_GIVEN_BACK = 256  # Commits wait about 4 ms while this many pages are freed in one job.
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """Groups that compaction may remove from the database, and the batches that contain them.

    Attributes:
        groups: Ids of the groups, in the order in which they are removed.
        consumed_by: For each trajectory that is consumed on the current lineage, at the checkpoint
            `oldest` of `plan` and at every restorable checkpoint, the batch that consumed it on the
            current lineage.
        batches_of: For each trajectory, the keys of all batches (of any lineage) that contain it.
        restorable: The checkpoints that can still be restored. None of them needs these groups.
    """

    groups: tuple[int, ...] = ()
    consumed_by: Mapping[int, BatchRow] = field(default_factory=dict)
    batches_of: Mapping[int, Sequence[int]] = field(default_factory=dict)
    restorable: tuple[PolicyVersion, ...] = ()


@dataclass(frozen=True)
class Removal:
    """Changes that one transaction of compaction makes in the database when it removes old groups.

    Attributes:
        groups: Ids of the groups whose rows are deleted.
        batches: New rows for the batches that contain trajectories of these groups; the new rows
            list the other trajectories only.
        consumed_by: For each trajectory of the groups that is consumed, the batch that consumed it.
        exported: The new totals of everything that compaction has removed so far.
    """

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
    """Choose the groups that compaction can remove from the database, because no resume needs them.

    A trajectory is consumed at a policy version if the weights of that version were trained on its
    batch. A group is chosen if each of its trajectories is either dropped, or consumed at all of
    these versions: the newest one of `lineage`, the checkpoint `oldest`, and each one in `kept`.

    A store that was replaced by an older database may have lost the lineage of a checkpoint in
    `kept`. Such a checkpoint is ignored, because the store has no trajectories of its lineage.

    Args:
        tree: All lineages of the store.
        lineage: Number of the current lineage.
        batches: All batches of the store, of any lineage.
        groups: Trajectory ids of every group, by group id.
        dropped: Ids of the dropped trajectories.
        kept: The checkpoints that can still be restored.
        oldest: The checkpoint that is `store.compact_after_checkpoints` checkpoints old (see
            `horizon`). None if no checkpoint is that old; no group is then chosen.
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
    """Return the `compact_after`-th newest checkpoint; groups trained before it may be removed.

    Only checkpoints on the sequence of updates that led to `lineage` are counted: those of the
    lineage itself, and those of each ancestor up to the checkpoint from which a resume continued
    it. The newest one counts as 1 checkpoint old. Returns None if there are fewer than
    `compact_after` of them.
    """
    here = Consumption.at(tree, lineage)
    on_path = {p.number: p for p in sorted(checkpoints) if here.descends_from(p.lineage, p.number)}
    numbers = sorted(on_path, reverse=True)
    return on_path[numbers[compact_after - 1]] if len(numbers) >= compact_after else None


def removal(chosen: Sequence[int], whole: Plan, state: StoreState) -> Removal:
    """Return what one transaction must change in the database to remove the groups `chosen`.

    `apply_removal` executes the transaction.

    Args:
        chosen: Ids of the groups, which are some of the groups in `whole`.
        whole: The plan of the whole compaction.
        state: The store's content in memory.
    """
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
    """Delete the rows of the groups of `change` and of their trajectories, in one transaction.

    The same transaction writes the new batches and totals of `change`. Chunks and turns remain in
    the database: they may be many, so `delete_chunks_or_turns` deletes them in several short
    transactions.

    Raises:
        DamagedStore: The row of a group is missing or damaged.
    """
    with connection:  # Commits at the end, or rolls back after an error.
        connection.execute("BEGIN IMMEDIATE")
        for group_id in change.groups:
            ids = read_group(connection, group_id).trajectory_ids
            bounds = (ids[0], ids[-1])
            connection.execute(
                "DELETE FROM trajectories WHERE trajectory_id BETWEEN ? AND ?", bounds
            )
            connection.execute("DELETE FROM groups WHERE group_id = ?", (group_id,))
        write_rows(connection, BatchRow, [with_checksum(batch) for batch in change.batches])
        write_rows(connection, DocumentRow, [with_checksum(change.exported.to_row())])


def orphaned_keys(file: Path, kind: schema.Kind) -> list[int]:
    """Return the keys of all chunks or turns in database `file` whose trajectory row was deleted.

    Args:
        file: The database.
        kind: `ChunkRow` for chunks, `TurnRow` for turns.

    Returns:
        The keys in ascending order. Rows with adjacent keys share pages of the file, so that
        deleting the rows in this order changes few pages at a time.
    """
    table = schema.TABLES[kind]
    with closing(schema.connect(file, read_only=True)) as connection:
        found = connection.execute(
            # Without this index SQLite would scan the table, and so read the tokens of all chunks.
            f"SELECT {schema.PART_KEYS[kind]} FROM {table} INDEXED BY {table}_of "
            "WHERE trajectory_id NOT IN (SELECT trajectory_id FROM trajectories)"
        )
        return sorted(row[0] for row in found)


def delete_chunks_or_turns(
    connection: sqlite3.Connection, kind: schema.Kind, keys: Sequence[int]
) -> None:
    """Delete the chunks or turns that have these `keys`, in one transaction.

    `kind` is `ChunkRow` for chunks and `TurnRow` for turns.
    """
    rows = f"{schema.TABLES[kind]} WHERE {schema.PART_KEYS[kind]}"
    chosen = "SELECT value FROM json_each(?)"
    connection.execute(f"DELETE FROM {rows} IN ({chosen})", (json.dumps(keys),))


def vacuum_pages(connection: sqlite3.Connection) -> bool:
    """Shrink the database file by up to `_PAGES_GIVEN_BACK` free pages.

    Returns:
        Whether the file still has free pages.
    """
    # Each step of this statement frees one page. `executescript` repeats the steps until the
    # statement is done, but `execute` would do only one step, since the statement returns no rows.
    connection.executescript(f"PRAGMA incremental_vacuum({_PAGES_GIVEN_BACK})")
    return bool(connection.execute("PRAGMA freelist_count").fetchone()[0])


class Compactor:
    """Moves groups that no restorable checkpoint needs from an open store to its export file.

    Groups are removed from the database and from the state in memory, in a background task.
    """

    def __init__(
        self, location: StoreLocation, state: StoreState, writer: StoreWriter, settings: StoreConfig
    ) -> None:
        self._location, self._state, self._writer = location, state, writer
        self._after = settings.compact_after_checkpoints
        self._file = location.export_file if settings.export == "jsonl" else None
        self._task: asyncio.Task[None] | None = None

    def start(self, kept: Sequence[PolicyVersion]) -> None:
        """Start compacting in the background; `kept` lists the checkpoints that can be restored."""
        self._task = asyncio.create_task(self._compact(kept))

    async def finish(self) -> None:
        """Wait for the running compaction (export and removal of old groups), if there is one.

        Raises:
            ComponentFailure: The compaction failed or exceeded a time limit.
            DamagedStore: A row that was to be exported is damaged.
        """
        if self._task is not None:
            task, self._task = self._task, None
            try:
                await task
            except sqlite3.Error as error:
                raise ComponentFailure(
                    f"compaction of trajectory store {self._location.file} failed: {reason(error)}"
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

        # The plan is made from the trajectories that are dropped in memory. The export reads the
        # database, so wait until these drops are committed there.
        await self._writer.committed()
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
        for kind in schema.PART_KEYS:
            find = partial(orphaned_keys, self._location.file, kind)
            left = await self._on_thread(find, f"a query for removed {schema.TABLES[kind]}")
            for start in range(0, len(left), _PARTS_PER_REMOVAL):
                keys = left[start : start + _PARTS_PER_REMOVAL]
                await self._run(partial(delete_chunks_or_turns, kind=kind, keys=keys))
        while await self._run(vacuum_pages):
            pass

    def _pieces(self, groups: Sequence[int]) -> Iterator[list[int]]:
        """Split `groups` into lists; each list is removed from the database in one transaction.

        A list ends at the group with which it reaches `_PARTS_PER_REMOVAL` trajectories and chunks.
        """
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

        return await self._on_thread(write, f"writing lines to the export {file}")

    async def _on_thread(self, work: Callable[[], T], name: str) -> T:
        """Run `work` on another thread, with a time limit, and return its result.

        Raises:
            ComponentFailure: `work` did not end within the writer's `stall_seconds`. The message
                calls the work `name`. The thread is not stopped, since threads cannot be.
        """
        try:
            async with asyncio.timeout(limit := self._writer.stall_seconds):
                return await asyncio.to_thread(work)
        except TimeoutError as error:
            raise ComponentFailure(f"{name} did not end within {limit:g} s") from error

    async def _run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """Run `job` on the writer thread after it has committed everything queued so far.

        Returns:
            The result of `job`.
        """
        return await self._writer.wait(self._writer.run(job))
