"""State of a store in memory, read from its file: the part of a resume that is the store's.

Invariants
- Opening an intact file changes two things: the new lineage is recorded, and what ran is partial.
- Losing data is preferred to training it twice: in a store that is behind what the run has seen,
  groups that are not known to be consumed are set aside.
- A lineage continues a checkpoint that the store can still serve, or opening is refused. What is
  behind may not have the checkpoint's lineage; the new one then continues the newest that it has.
"""

import itertools
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from megatron_async.errors import UserError
from megatron_async.files.disk import replace_durably
from megatron_async.store import reader as reader
from megatron_async.store import recovery as recovery
from megatron_async.store.documents import Counters, Exported
from megatron_async.store.lineage import Consumption, Lineage, LineageTree
from megatron_async.store.location import StoreLocation
from megatron_async.store.reader import StoreContent
from megatron_async.store.records import GroupRecord, TrajectoryRecord
from megatron_async.store.recovery import Recovery
from megatron_async.store.schema import BatchRow, DamagedStore
from megatron_async.store.writer import StoreWriter
from megatron_async.trajectory.types import PolicyVersion, TrajectoryState


@dataclass
class StoreState:
    """Everything but the writer. `batches` is keyed by row, of all lineages; of those that
    compaction has emptied, the newest of each lineage.

    `batch_keys` are larger than every row's key, those of `undone_batches` too: their deletion may
    be in one transaction with the first new batch.
    """

    lineage: int
    tree: LineageTree
    counters: Counters
    exported: Exported
    position: int
    batches: dict[int, BatchRow]
    batch_keys: Iterator[int]
    turn_keys: Iterator[int]
    checkpoints: list[PolicyVersion]
    groups: dict[int, GroupRecord] = field(default_factory=dict)
    records: dict[int, TrajectoryRecord] = field(default_factory=dict)
    changed: list[TrajectoryRecord] = field(default_factory=list)
    set_aside: list[GroupRecord] = field(default_factory=list)
    undone_batches: list[BatchRow] = field(default_factory=list)
    recovery: Recovery | None = None

    def counts(self) -> dict[str, int]:
        """Trajectories by state along the current lineage, exported ones included."""
        counts = Counter({state.value: 0 for state in TrajectoryState})
        counts.update(record.shown_state.value for record in self.records.values())
        counts[TrajectoryState.BATCHED.value] += self.exported.batched
        counts[TrajectoryState.DROPPED.value] += sum(self.exported.dropped.values())
        return dict(counts)

    def batch_sizes(self) -> dict[int, int]:
        """See `TrajectoryStore.batch_sizes`."""
        on_path = Consumption.at(self.tree, self.lineage)
        return {
            batch.step: len(batch.ids())
            for batch in self.batches.values()
            if on_path.holds(batch.lineage, batch.step)
            and (batch.trajectory_ids or batch.drop_reason is not None)
        }

    def live_groups(self) -> list[GroupRecord]:
        """Groups with a trajectory that is neither consumed nor dropped, in order of admission."""
        return [
            group
            for group in self.groups.values()
            if any(self.records[i].live for i in group.trajectory_ids)
        ]

    def batch_members(self, group: GroupRecord) -> list[TrajectoryRecord]:
        """Members that a batch takes: those not dropped, all scored and in no batch; else
        ValueError."""
        members = [self.records[i] for i in group.trajectory_ids]
        for r in members:
            if (r.live and r.state is not TrajectoryState.SCORED) or r.batched_step is not None:
                raise ValueError(
                    f"group {group.group_id} cannot be batched: trajectory "
                    f"{r.row.trajectory_id} is {r.shown_state}"
                )
        return [r for r in members if r.live]

    def forget_emptied_batches(self) -> None:
        """Drop what nothing refers to; the newest of a lineage shows how far that came."""
        newest = {batch.lineage: key for key, batch in self.batches.items()}.values()
        for key in [k for k, batch in self.batches.items() if not batch.trajectory_ids]:
            if key not in newest:
                del self.batches[key]

    def batch_at(self, step: int) -> BatchRow | None:
        """The batch of update `step` on the current lineage, dropped or not."""
        for batch in reversed(self.batches.values()):
            if (batch.lineage, batch.step) == (self.lineage, step):
                return batch
        return None


def load_state(
    location: StoreLocation, *, lineage: int, step: int, parent: int | None, position: int | None
) -> StoreState:
    """Read the database and begin (or go on with) lineage `lineage` at policy number `step`.

    One that is elsewhere is brought to `place`; for one that is damaged, gone, or ends before
    `position`, see `recovery`. Raises UserError when the lineage cannot
    be begun, OSError or sqlite3.Error when the file cannot be opened at all.
    """
    needed = position or 0
    read = partial(_read_state, lineage=lineage, step=step, parent=parent, needed=needed)
    reason = recovery.fetch_database(location)
    found = None
    if reason is None:
        found, reason = _read_checked(read, location.file)
        if found is not None:
            if found.position >= needed:
                return found
            reason = f"ends at transaction {found.position}"
    unknown = position is None and step > 0  # what the trainer has seen
    return _choose_copy(location, read, found, reason, needed, unknown)


def first_writes(state: StoreState, writer: StoreWriter) -> None:
    """Write what opening has changed."""
    writer.put(state.tree.lineages()[-1])
    writer.put(state.counters.to_row())
    for batch in state.undone_batches:
        writer.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
    for record in state.changed:
        writer.put(record.row)
    for group in state.set_aside:
        writer.execute("DELETE FROM groups WHERE group_id = ?", (group.group_id,))
        bounds = (group.trajectory_ids[0], group.trajectory_ids[-1])  # compaction has their parts
        writer.execute("DELETE FROM trajectories WHERE trajectory_id BETWEEN ? AND ?", bounds)


def _read_checked(
    read: Callable[[Path], StoreState], file: Path
) -> tuple[StoreState | None, str | None]:
    """The state, or what is damaged."""
    try:
        return read(file), None
    except (DamagedStore, sqlite3.Error) as error:
        if not recovery.is_damage(error):
            raise
        return None, f"is damaged ({error})"


def _choose_copy(
    location: StoreLocation,
    read: Callable[[Path], StoreState],
    found: StoreState | None,
    reason: str | None,
    needed: int,
    unknown: bool,
) -> StoreState:
    """The better one of what was `found` and the replica, or an empty store; what is lost, named.

    `unknown`: it is not known which position would do.
    """
    known = None if found is not None else recovery.counters_of(location.file, needed)
    replica, damaged = None, None
    copy = location.file.with_name(f"{location.file.name}.restored")
    if recovery.restore(location, copy):
        replica, fault = _read_checked(read, copy)
        reason = reason if fault is None else f"{reason} and its replica {fault}"
    if replica is not None and (found is None or replica.position > found.position):
        state = replica
        instead = f"its replica takes its place, which ends at transaction {state.position}"
        damaged = recovery.set_aside(location.file)
        replace_durably(copy, location.file)
    elif found is not None:
        state, instead = found, "it goes on from there"
    else:
        damaged = recovery.set_aside(location.file)
        state, instead = read(location.file), "there is no replica of it: it begins anew"
    behind = state.position < needed or (unknown and state is not found)
    if state.position < needed:
        instead += f" (the run has seen transaction {needed})"
    first = state.counters.next_trajectory
    recovery.skip_used_ids(state.counters, known)
    if behind and known is not None:
        state.counters.prompts = max(state.counters.prompts, known.prompts)
    aside = [i for group in _set_aside(state) for i in group.trajectory_ids] if behind else []
    lost = 0 if known is None else state.counters.next_trajectory - first
    state.position = max(state.position, needed)
    sentence = f"trajectory store {location.file} {reason}; {instead}"
    if known is None:
        sentence += f"; trajectories from {first} on are lost"
    elif lost:
        sentence += f"; trajectories {first} to {first + lost - 1} are lost"
    if aside:
        sentence += (
            f"; {len(aside)} trajectories ({min(aside)} to {max(aside)}) are set aside, since "
            "they may have been trained"
        )
    if damaged is not None:
        sentence += f"; the damaged file is kept as {damaged}"
    state.recovery = Recovery(sentence, damaged, behind)
    return state


def _read_state(
    path: Path, *, lineage: int, step: int, parent: int | None, needed: int
) -> StoreState:
    with recovery.checked(path) as connection:
        content = reader.read_content(connection)
        state = StoreState(
            lineage=lineage,
            tree=content.tree,
            counters=content.counters,
            exported=content.exported,
            position=content.position,
            batches={batch.id: batch for batch in content.batches},
            batch_keys=itertools.count(max((b.id for b in content.batches), default=0) + 1),
            turn_keys=itertools.count(reader.newest_turn(connection) + 1),
            checkpoints=content.checkpoints,
        )
        _begin_lineage(state, path, step, parent, behind=state.position < needed)
        content.batches = list(state.batches.values())
        _fill(state, content, connection)
    return state


def _set_aside(state: StoreState) -> list[GroupRecord]:
    """Take out every group that is not consumed: any of them may be in a batch that is missing."""
    state.set_aside = state.live_groups()
    for group in state.set_aside:
        del state.groups[group.group_id]
        for trajectory_id in group.trajectory_ids:
            del state.records[trajectory_id]
    return state.set_aside


def _begin_lineage(
    state: StoreState, path: Path, step: int, parent: int | None, *, behind: bool
) -> None:
    tree, lineage = state.tree, state.lineage
    if tree and lineage < tree.newest:
        raise UserError(
            f"lineage {lineage} cannot be begun in {path}: its newest lineage is {tree.newest}"
        )
    if lineage in tree:
        state.undone_batches = [
            batch
            for batch in state.batches.values()
            if batch.lineage == lineage and batch.step >= step
        ]
        for batch in state.undone_batches:
            del state.batches[batch.id]
        return
    if parent is None or (behind and parent not in tree):
        parent = tree.newest if tree else None  # what that has consumed is not consumed again
    if parent is not None and not behind:
        check_serves(path, tree, state.exported, PolicyVersion(parent, step))
    tree.add(Lineage(lineage, parent, step))


def check_serves(
    path: Path, tree: LineageTree, exported: Exported, restored: PolicyVersion
) -> None:
    """Check that a lineage can go on from the checkpoint `restored`. Raises UserError."""
    if restored.lineage not in tree:
        raise UserError(
            f"checkpoint {restored} cannot be resumed from: {path} holds no lineage "
            f"{restored.lineage}"
        )
    consumed = Consumption.at_checkpoint(tree, restored)
    if exported.at and not any(consumed.reaches(*point) for point in exported.at):
        oldest = " or ".join(map(str, exported.at))
        raise UserError(
            f"checkpoint {restored} cannot be resumed from: {path} has exported trajectories "
            f"that it would need; {oldest} and later can be"
        )


def _fill(state: StoreState, content: StoreContent, connection: sqlite3.Connection) -> None:
    """Make the records of `content`, with the tokens of those that are live."""
    batched = content.batched_steps(Consumption.at(state.tree, state.lineage))
    live = [
        row.trajectory_id
        for row in content.trajectories.values()
        if row.trajectory_id not in batched and row.drop_reason is None
    ]
    parts = reader.read_parts(connection, live)
    for row in content.groups.values():
        group = GroupRecord(row.group_id, reader.prompt_of(row), row.trajectory_ids)
        state.groups[row.group_id] = group
    for stored in content.trajectories.values():
        trajectory_id = stored.trajectory_id
        step = batched.get(trajectory_id)
        if step is not None or stored.drop_reason is not None:
            record = TrajectoryRecord(stored, None)
            record.batched_step = step
        else:
            tokens = reader.assemble(stored, parts)
            row_found = stored._replace(chunks=len(tokens.chunks))
            record = TrajectoryRecord(row_found, tokens.segments, tokens.turns, tokens.turn_keys)
            if not tokens.complete:
                raise DamagedStore(f"tokens of trajectory {trajectory_id} are missing")
            if record.state is TrajectoryState.RUNNING:
                record.interrupt()
                state.changed.append(record)
        state.records[trajectory_id] = record
