"""What a store knows in memory, and how it comes to know it: a resume is done here.

Invariants
- Opening an intact file changes two things: the new line is noted, and what ran is partial. In a
  salvaged one a trajectory whose chunks have a gap is cut there, and is partial.
- At most once comes before nothing lost: when a salvaged file does not tell of each batch on the
  path, groups that may have been in a missing one are set aside (they stay in the damaged file),
  never trained a second time.
- A line continues a checkpoint that the store can still serve, or opening is refused.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_async.errors import UserError
from megatron_async.store.compaction import is_restorable
from megatron_async.store.lineage import Consumption, Line, LineTree, reached
from megatron_async.store.reader import (
    Counters,
    Exported,
    StoreContent,
    assemble,
    prompt_of,
)
from megatron_async.store.records import GroupRecord, TrajectoryRecord
from megatron_async.store.recovery import (
    Recovery,
    is_damage,
    read_store,
    read_tokens,
    salvage,
)
from megatron_async.store.schema import BatchRow, ChunkRow, DamagedStore
from megatron_async.trajectory.types import DropReason, PolicyVersion, TrajectoryState


@dataclass
class StoreState:
    """Everything but the writer. `batches` is keyed by row, of all lines.

    `next_batch` is larger than every row's key, those of `undone_batches` too: their deletion may
    be in one transaction with the first new batch.
    """

    lineage: int
    tree: LineTree
    counters: Counters
    exported: Exported
    position: int
    batches: dict[int, BatchRow]
    next_batch: int
    checkpoints: list[PolicyVersion]
    groups: dict[int, GroupRecord] = field(default_factory=dict)
    records: dict[int, TrajectoryRecord] = field(default_factory=dict)
    changed: list[TrajectoryRecord] = field(default_factory=list)
    cut: list[tuple[TrajectoryRecord, list[ChunkRow]]] = field(default_factory=list)
    set_aside: list[GroupRecord] = field(default_factory=list)
    undone_batches: list[BatchRow] = field(default_factory=list)
    recovery: Recovery | None = None

    @property
    def line(self) -> Line:
        """The current line."""
        return self.tree.line(self.lineage)

    def counts(self) -> dict[str, int]:
        """Trajectories by state along the current line, exported ones included."""
        counts = Counter({state.value: 0 for state in TrajectoryState})
        counts.update(record.shown_state.value for record in self.records.values())
        counts[TrajectoryState.BATCHED.value] += self.exported.batched
        counts[TrajectoryState.DROPPED.value] += sum(self.exported.dropped.values())
        return dict(counts)

    def drop_counts(self) -> dict[str, int]:
        """Dropped trajectories by reason, exported ones included."""
        counts = Counter({reason.value: 0 for reason in DropReason})
        counts.update(
            record.drop_reason.value
            for record in self.records.values()
            if record.drop_reason is not None and record.batched_step is None
        )
        counts.update(self.exported.dropped)
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

    def batch_at(self, step: int) -> BatchRow | None:
        """The batch of update `step` on the current line, dropped or not."""
        for batch in reversed(self.batches.values()):
            if (batch.lineage, batch.step) == (self.lineage, step):
                return batch
        return None


def load_state(
    path: Path, *, lineage: int, step: int, parent: int | None, position: int | None
) -> StoreState:
    """Read the file and begin (or go on with) line `lineage` at policy number `step`.

    A damaged file is salvaged first. Raises UserError when the file cannot be opened at all, or the
    line cannot be begun.
    """
    try:
        state = _read_state(path, lineage, step, parent)
        if position is not None and state.position < position:
            raise DamagedStore(
                f"it ends at transaction {state.position}, the checkpoint was made at {position}"
            )
        return state
    except (DamagedStore, sqlite3.Error) as error:
        if not is_damage(error):
            raise UserError(f"trajectory store {path} cannot be opened: {error}") from error
        recovery = salvage(path, str(error), position or 0)
    state = _read_state(path, lineage, step, parent)
    set_aside = _set_aside(state, step, everything=recovery.behind)
    more = ""
    if state.cut:
        more += f"; {len(state.cut)} trajectories are cut at a gap"
    if set_aside:
        more += f"; {set_aside} are set aside, they may have been trained already"
    state.recovery = replace(
        recovery,
        sentence=recovery.sentence + more,
        cut_trajectories=len(state.cut),
        set_aside_trajectories=set_aside,
    )
    return state


def _read_state(path: Path, lineage: int, step: int, parent: int | None) -> StoreState:
    content = read_store(path)
    state = StoreState(
        lineage=lineage,
        tree=content.tree,
        counters=content.counters,
        exported=content.exported,
        position=content.position,
        batches={batch.id: batch for batch in content.batches},
        next_batch=max((batch.id for batch in content.batches), default=0) + 1,
        checkpoints=content.checkpoints,
    )
    _begin_line(state, path, step, parent)
    undone = {i for batch in state.undone_batches for i in batch.ids()}
    batched = {
        trajectory_id: batched_step
        for trajectory_id, batched_step in content.batched_steps(
            Consumption.at(state.tree, lineage)
        ).items()
        if trajectory_id not in undone
    }
    live = [
        row.trajectory_id
        for row in content.trajectories.values()
        if row.trajectory_id not in batched and row.drop_reason is None
    ]
    _fill(state, content, read_tokens(path, live), batched)
    return state


def _set_aside(state: StoreState, step: int, *, everything: bool) -> int:
    """Take out groups that may have been in a batch of which there is no record.

    Such a group was complete, and the batch not older than any of its tokens. With `everything` the
    states that are known may be old ones, so that it can be any group. Returns the number of
    trajectories.
    """
    missing = _newest_missing_step(state, step)
    if missing < 0:
        return 0
    points = state.tree.branch_points(state.lineage)
    count = 0
    for group in list(state.groups.values()):
        live = [r for i in group.trajectory_ids if (r := state.records[i]).live]
        complete = all(r.state is TrajectoryState.SCORED for r in live)
        if not live or not (complete or everything):
            continue
        numbers = [
            version.number
            if version.lineage == state.lineage
            else min(version.number, points.get(version.lineage, 0))
            for record in live
            for version in record.versions()
        ]
        if everything or max(numbers, default=0) <= missing:
            state.set_aside.append(group)
            del state.groups[group.group_id]
            for trajectory_id in group.trajectory_ids:
                del state.records[trajectory_id]
            count += len(group.trajectory_ids)
    state.counters.lost_trajectories += count
    return count


def _newest_missing_step(state: StoreState, step: int) -> int:
    """The last update before `step` on the current path whose batch is not known; -1: none."""
    known = {(batch.lineage, batch.step) for batch in state.batches.values()}
    missing = [-1]
    for lineage, limit in state.tree.path(state.lineage).items():
        line = state.tree.line(lineage)
        first = line.branch_step
        if line.parent is None and lineage == state.lineage:
            first = 0  # what came before this line was in the part that is lost
        end = step if limit is None else limit
        missing += [n for n in range(first, end) if (lineage, n) not in known]
    return max(missing)


def _begin_line(state: StoreState, path: Path, step: int, parent: int | None) -> None:
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
    if tree and parent is None:
        parent = _parent_of(state, step)
    if parent is not None:
        check_serves(path, tree, state.exported, PolicyVersion(parent, step))
    tree.add(Line(lineage, parent, step))


def check_serves(path: Path, tree: LineTree, exported: Exported, restored: PolicyVersion) -> None:
    """Raises UserError unless a line can go on from the checkpoint `restored`."""
    if restored.lineage not in tree:
        raise UserError(
            f"checkpoint {restored} cannot be resumed from: {path} holds no lineage "
            f"{restored.lineage}"
        )
    if not is_restorable(tree, restored, exported):
        oldest = " or ".join(f"{a}.{b}" for a, b in exported.at)
        raise UserError(
            f"checkpoint {restored} cannot be resumed from: {path} has exported trajectories "
            f"that it would need; {oldest} and later can be"
        )


def _parent_of(state: StoreState, step: int) -> int:
    """The line whose checkpoint of `step` is the newest, as far as the store knows."""
    recorded = [point.lineage for point in state.checkpoints if point.number == step]
    if recorded:
        return max(recorded)
    numbers = reached(state.tree, ((b.lineage, b.step) for b in state.batches.values()))
    holding = [
        line.lineage
        for line in state.tree.lines()
        if line.branch_step <= step <= numbers[line.lineage]
    ]
    return max(holding, default=state.tree.newest)


def _fill(
    state: StoreState,
    content: StoreContent,
    chunks: Mapping[int, Sequence[ChunkRow]],
    batched: Mapping[int, int],
) -> None:
    for row in content.groups.values():
        ids = range(row.first_trajectory, row.first_trajectory + row.size)
        state.groups[row.group_id] = GroupRecord(row.group_id, prompt_of(row), ids)
    for stored in content.trajectories.values():
        trajectory_id = stored.trajectory_id
        step = batched.get(trajectory_id)
        if step is not None or stored.drop_reason is not None:
            record = TrajectoryRecord(stored, None)
            record.batched_step = step
        else:
            tokens = assemble(stored, chunks.get(trajectory_id, ()))
            record = TrajectoryRecord(stored, tokens.segments)
            was_running = record.state is TrajectoryState.RUNNING
            record.chunks = len(tokens.chunks)
            if was_running or not tokens.complete:
                record.interrupt()
                state.changed.append(record)
            if not tokens.complete:
                # a new attempt: whatever is left of the old one beyond the gap can never come back
                record.attempt += 1
                kept = [chunk._replace(attempt=record.attempt) for chunk in tokens.chunks]
                state.cut.append((record, kept))
        state.records[trajectory_id] = record
