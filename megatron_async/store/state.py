"""Provides `StoreState`, the content of a store in memory, and loads it from the database.

Loading is the store's share of a start or resume: it begins a new lineage, which is the part of the
run until the next resume.

Invariants
- Opening an intact file changes two things: the new lineage is recorded, and trajectories that were
  running become partial.
- Losing data is preferred to training on it twice: in a store that lacks transactions which the
  trainer has seen, groups that are not known to be consumed are excluded from training.
- A lineage must continue a checkpoint whose trajectories the store still has, or opening is
  refused. A store that lacks transactions may not have the checkpoint's lineage; the new lineage
  then continues the newest lineage that the store has.
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
    """The content of an open store in memory, except the tokens of trajectories that are not live.
    A trajectory is live if it is neither dropped nor in a batch that counts on the current lineage.

    Attributes:
        lineage: Number of the current lineage.
        tree: All lineages.
        counters: Counters of used ids and read prompts.
        exported: Totals of the trajectories that compaction has removed.
        position: Number of transactions ever committed when the store was opened; the writer
            continues counting from there.
        batches: Batches of all lineages by key. Batches that compaction has emptied may be missing,
            except the newest of them in each lineage.
        batch_keys: Keys for new batches. They are larger than every existing key, including those
            of `undone_batches`: a transaction executes its deletions last, so that a new batch with
            the key of an undone batch could be deleted with it.
        turn_keys: Keys for new turns, which are larger than every existing key.
        checkpoints: Finalized checkpoints of all lineages, in the order in which they were
            recorded.
        groups: Groups by id.
        records: Trajectories by id.
        changed: Trajectories whose rows opening has changed (`first_writes` writes them).
        set_aside: Groups that opening excluded from training, since they may have been trained
            already. There are none unless the store may have lost transactions.
        undone_batches: Batches of the current lineage at or after the step that it continues from,
            which opening deletes; their trajectories are scored again.
        recovery: Recovery that opening the store required; None if the database was usable.
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
        """Return the number of trajectories in each state on the current lineage.

        Trajectories that compaction removed count as batched or dropped.
        """
        counts = Counter({state.value: 0 for state in TrajectoryState})
        counts.update(record.shown_state.value for record in self.records.values())
        counts[TrajectoryState.BATCHED.value] += self.exported.batched
        counts[TrajectoryState.DROPPED.value] += sum(self.exported.dropped.values())
        return dict(counts)

    def batch_sizes(self) -> dict[int, int]:
        """Return, by step, the size of each batch of the current lineage or one that it continues.

        The size is the number of trajectories. Batches of earlier lineages are included only up to
        the checkpoints from which these lineages were continued. A batch that the trainer dropped
        has size 0. Trajectories that compaction removed are not counted. A batch of which
        compaction removed all trajectories is left out.
        """
        on_path = Consumption.at(self.tree, self.lineage)
        return {
            batch.step: len(batch.ids())
            for batch in self.batches.values()
            if on_path.contains(batch.lineage, batch.step)
            and (batch.trajectory_ids or batch.drop_reason is not None)
        }

    def live_groups(self) -> list[GroupRecord]:
        """Return the groups with a trajectory that is neither batched nor dropped, oldest first.

        Batched means in a batch of the current lineage, or of one that it continues.
        """
        return [
            group
            for group in self.groups.values()
            if any(self.records[i].live for i in group.trajectory_ids)
        ]

    def batch_members(self, group: GroupRecord) -> list[TrajectoryRecord]:
        """Return the trajectories of `group` that are not dropped, which go into the group's batch.

        Raises:
            ValueError: A trajectory of the group is neither scored nor dropped, or is in a batch
                already.
        """
        members = [self.records[i] for i in group.trajectory_ids]
        for r in members:
            if (r.live and r.state is not TrajectoryState.SCORED) or r.batched_step is not None:
                raise ValueError(
                    f"group {group.group_id} cannot be batched: trajectory "
                    f"{r.row.trajectory_id} is {r.shown_state}"
                )
        return [r for r in members if r.live]

    def forget_emptied_batches(self) -> None:
        """Delete batches without trajectories from memory, except the newest batch of each lineage.

        The newest batch shows which step the lineage has reached.
        """
        newest = {batch.lineage: key for key, batch in self.batches.items()}.values()
        for key in [k for k, batch in self.batches.items() if not batch.trajectory_ids]:
            if key not in newest:
                del self.batches[key]

    def batch_at(self, step: int) -> BatchRow | None:
        """Return the batch of update `step` on the current lineage, or None if there is none.

        A batch that the trainer dropped is returned too.
        """
        for batch in reversed(self.batches.values()):
            if (batch.lineage, batch.step) == (self.lineage, step):
                return batch
        return None


def load_state(
    location: StoreLocation, *, lineage: int, step: int, parent: int | None, position: int | None
) -> StoreState:
    """Load a store's content from its database, and begin or continue lineage `lineage`.

    A database that is elsewhere is first copied to `location`. If it is damaged, missing, or ends
    before transaction `position`, the replica or an empty store may replace it;
    `StoreState.recovery` then says what is lost.

    Args:
        location: Where the database belongs on this node.
        lineage: Number of the lineage. A number that the store has already must be the newest.
        step: Policy number at which the lineage begins or continues.
        parent: Lineage of the restored checkpoint; None means the newest lineage of the store.
        position: Number of transactions that the trainer may have seen: those that the store had
            committed when the restored checkpoint was saved or, if only the rollout manager is
            restarted, when the trainer's newest batch was made. None if unknown.

    Raises:
        UserError: The lineage cannot be started.
        OSError: A file cannot be opened or copied.
        sqlite3.Error: SQLite cannot open the file, for a reason other than damage.
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
    # The trainer has trained (`step` > 0), but it is unknown how many transactions it has seen; a
    # replica may have fewer.
    unknown = position is None and step > 0
    return _choose_copy(location, read, found, reason, needed, unknown)


def first_writes(state: StoreState, writer: StoreWriter) -> None:
    """Write to the database what loading `state` has changed.

    This is the new lineage, the counters, interrupted trajectories, and the deletion of undone
    batches and of groups that are excluded from training.
    """
    writer.put(state.tree.lineages()[-1])
    writer.put(state.counters.to_row())
    for batch in state.undone_batches:
        writer.execute("DELETE FROM batches WHERE id = ?", (batch.id,))
    for record in state.changed:
        writer.put(record.row)
    for group in state.set_aside:
        writer.execute("DELETE FROM groups WHERE group_id = ?", (group.group_id,))
        # The chunks and turns of these trajectories are deleted by the next compaction.
        bounds = (group.trajectory_ids[0], group.trajectory_ids[-1])
        writer.execute("DELETE FROM trajectories WHERE trajectory_id BETWEEN ? AND ?", bounds)


def _read_checked(
    read: Callable[[Path], StoreState], file: Path
) -> tuple[StoreState | None, str | None]:
    """Load `file` with `read`; return (state, None), or (None, description of the damage).

    An error that is not damage, such as the error of a locked file, is raised.
    """
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
    """Choose between the database, its replica and an empty store; return the chosen store's state.

    The replica replaces the database if it has more transactions or the database is unusable. An
    empty store replaces both if neither is usable. `recovery` of the result says what is lost.

    Args:
        location: Where the database is.
        read: Loads the state from a database file.
        found: State of the database; None if the database is damaged, missing or out of reach.
        reason: Problem of the database, as the end of a sentence about it.
        needed: Number of transactions that the trainer may have seen; 0 if unknown.
        unknown: Whether the trainer may have seen more transactions than `needed`.
    """
    known = None if found is not None else recovery.counters_of(location.file, needed)
    replica, damaged = None, None
    copy = location.file.with_name(f"{location.file.name}.restored")
    if recovery.restore(location, copy):
        replica, fault = _read_checked(read, copy)
        reason = reason if fault is None else f"{reason} and its replica {fault}"
    if replica is not None and (found is None or replica.position > found.position):
        state = replica
        instead = f"it is replaced by its replica, which ends at transaction {state.position}"
        damaged = recovery.keep_damaged(location.file)
        replace_durably(copy, location.file)
    elif found is not None:
        state, instead = found, "the run continues from that transaction"
    else:
        damaged = recovery.keep_damaged(location.file)
        state, instead = read(location.file), "it has no usable replica, so the store starts empty"
    behind = state.position < needed or (unknown and state is not found)
    if state.position < needed:
        instead += f" (the trainer has seen transaction {needed})"
    first = state.counters.next_trajectory
    recovery.skip_used_ids(state.counters, known)
    if behind and known is not None:
        state.counters.prompts = max(state.counters.prompts, known.prompts)
    aside = [i for group in _set_aside(state) for i in group.trajectory_ids] if behind else []
    lost = 0 if known is None else state.counters.next_trajectory - first
    state.position = max(state.position, needed)
    message = f"trajectory store {location.file} {reason}; {instead}"
    if known is None:
        message += f"; trajectories from {first} on are lost"
    elif lost:
        message += f"; trajectories {first} to {first + lost - 1} are lost"
    if aside:
        message += (
            f"; {len(aside)} trajectories ({min(aside)} to {max(aside)}) are excluded from "
            "training, since they may have been trained already"
        )
    if damaged is not None:
        message += f"; the damaged file is kept as {damaged}"
    state.recovery = Recovery(message, damaged, behind)
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
    """Remove the groups with a trajectory that seems untrained from `state`; return these groups.

    Any of them may have been trained, in a batch that the store has lost.
    """
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
            f"lineage is {lineage}, but trajectory store {path} already has lineage "
            f"{tree.newest}; a new lineage needs a larger number"
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
        # Continue the newest lineage that the store has. Its batches before `step` then count as
        # consumed, so that the trainer does not get them again.
        parent = tree.newest if tree else None
    if parent is not None and not behind:
        check_serves(path, tree, state.exported, PolicyVersion(parent, step))
    tree.add(Lineage(lineage, parent, step))


def check_serves(
    path: Path, tree: LineageTree, exported: Exported, restored: PolicyVersion
) -> None:
    """Check that the store still has what a resume from the checkpoint `restored` needs.

    Args:
        path: The store, for messages.
        tree: All lineages of the store.
        exported: Totals of what compaction has removed from the store.
        restored: The checkpoint.

    Raises:
        UserError: The store does not have the checkpoint's lineage, or compaction has removed
            trajectories that are not consumed at the checkpoint.
    """
    if restored.lineage not in tree:
        raise UserError(
            f"checkpoint {restored} cannot be resumed from: trajectory store {path} has no lineage "
            f"{restored.lineage}"
        )
    consumed = Consumption.at_checkpoint(tree, restored)
    if exported.at and not any(consumed.descends_from(*point) for point in exported.at):
        oldest = " or ".join(map(str, exported.at))
        raise UserError(
            f"checkpoint {restored} cannot be resumed from: trajectory store {path} has exported "
            f"trajectories that it needs. Resume from checkpoint {oldest}, or from a later one"
        )


def _fill(state: StoreState, content: StoreContent, connection: sqlite3.Connection) -> None:
    """Add the groups and trajectories of `content` to `state`.

    Tokens are loaded for live trajectories, which are neither dropped nor consumed. Trajectories
    that were running become partial.

    Raises:
        DamagedStore: Tokens of a live trajectory are missing.
    """
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
