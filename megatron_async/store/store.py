"""The durable trajectory store of one run: every token, from prompt to gradient.

Invariants
- One process writes (a lock file keeps a second one out), through one thread; `append` and the
  other plain methods only touch memory. Readers are separate (`StoreReader`).
- What an awaited method promised survives the death of any process: a finished trajectory is
  acknowledged once it is committed. A kill loses at most the current chunk of a running one, if its
  source awaits `written` after `append`.
- The end of a trajectory is in one transaction with its last tokens (`append(..., end=...)`): no
  process may find those without the end, and ask for more.
- The truth about consumption is in no state column: batches name the lineage and step that they
  were made at, and a checkpoint manifest commits those on its path (`lineage`). So a resume from
  any kept checkpoint sees what it must, and changes nothing but to begin a new lineage.
- Ids only grow and are never used twice.
- A trajectory has one writer: `append` and `end_request` refuse every request but its current one,
  so that a stream that outlives its request cannot add to what its successor writes.
"""

import asyncio
import itertools
import json
import logging
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async.config.rollout import StoreConfig
from megatron_async.errors import UserError
from megatron_async.files.disk import reason
from megatron_async.files.lock import FileLock
from megatron_async.store import schema as schema
from megatron_async.store.buffers import ChunkBuffers
from megatron_async.store.compaction import Compactor
from megatron_async.store.episodes import EpisodeWriter
from megatron_async.store.export import cut_uncommitted
from megatron_async.store.location import StoreLocation, lock_store, prepared_location, write_record
from megatron_async.store.reader import read_tokens, trajectory_of
from megatron_async.store.records import Author, GroupRecord, TrajectoryRecord, running
from megatron_async.store.recovery import Recovery, Replicator
from megatron_async.store.schema import BatchRow, CheckpointRow, GroupRow, TrajectoryRow, pack_ids
from megatron_async.store.state import StoreState, first_writes, load_state
from megatron_async.store.writer import StoreWriter
from megatron_async.trajectory.columns import LOGPROBS, TOKEN_IDS, Arrays
from megatron_async.trajectory.packing import number_on_lineage
from megatron_async.trajectory.types import (
    DropReason,
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    RequestKey,
    Segment,
    Trajectory,
    TrajectoryState,
    Turn,
)

logger = logging.getLogger(__name__)
_WAIT_SECONDS = 60.0


class TrajectoryStore:
    """See the module. All methods belong to one thread (the event loop's)."""

    # ------------------------------------------------------------ open and close

    @classmethod
    def open(
        cls,
        path: Path | str,
        settings: StoreConfig | None = None,
        *,
        lineage: int = 0,
        step: int = 0,
        parent: int | None = None,
        position: int | None = None,
    ) -> "TrajectoryStore":
        """Begin lineage `lineage` at policy number `step`, or go on with it if it is the newest.

        `path` is RUN/trajectories.sqlite; the database may be elsewhere (`place`). On a
        resume, `parent` is the lineage of the restored checkpoint and `position` what its manifest
        keeps of `position()`. Without `parent` it is the newest lineage. Trajectories that ran are
        partial now; what was batched at `step` or later is scored again. For a damaged file see
        `recovery`. Raises UserError.
        """
        settings = settings or StoreConfig()
        location = prepared_location(Path(path), settings.directory)
        lock = lock_store(location.file)
        try:
            state = load_state(
                location, lineage=lineage, step=step, parent=parent, position=position
            )
            if state.recovery is not None:
                logger.warning("%s", state.recovery.sentence)
            cut_uncommitted(location.export_file, state.exported.bytes)
            write_record(location, lineage)
        except BaseException as error:
            lock.close()
            if isinstance(error, OSError | sqlite3.Error):
                raise UserError(
                    f"trajectory store {location.file} cannot be opened: {reason(error)}"
                ) from error
            raise
        return cls(location, settings, lock, state)

    def __init__(
        self, location: StoreLocation, settings: StoreConfig, lock: FileLock, state: StoreState
    ) -> None:
        """Use `open`."""
        self._location, self._settings, self._state = location, settings, state
        self._branch_points = state.tree.branch_points(state.lineage)
        self._counts = state.counts()  # kept: a person's status is asked for again and again
        self._serials = itertools.count(1)
        self._reading: sqlite3.Connection | None = None
        self._writer = StoreWriter(location.file, state.position, lock)
        self._buffers = ChunkBuffers(self._writer)
        self._loss_reported = False
        self._compactor = Compactor(location, state, self._writer, settings)
        self._replicator = Replicator(location, self._writer, state.lineage)
        flush = partial(self._buffers.flush, with_row=True)
        self.episodes = EpisodeWriter(state, self._writer, self._serials, self._move, flush)
        first_writes(state, self._writer)

    @property
    def lineage(self) -> int:
        """The current lineage."""
        return self._state.lineage

    @property
    def recovery(self) -> Recovery | None:
        """Return what opening found damaged or gone; None when all was well."""
        return self._state.recovery

    @property
    def export_file(self) -> Path:
        """Return the file in which compaction puts consumed trajectories."""
        return self._location.export_file

    async def close(self, *, leave: bool = False) -> None:
        """Write what is buffered, let compaction end, then the thread, which releases the file.

        `leave`: this node may not have the run again; the replica gets all that a database outside
        the run directory has, which is removed. Raises ComponentFailure when the thread does not
        end in time; the file stays locked then.
        """
        self._buffers.close()
        last = (
            self._replicator.last
            if leave and self._location.is_external
            else self._replicator.finish
        )
        async with AsyncExitStack() as ending:  # from the last, each whatever became of the others
            ending.callback(self._replicator.leave)
            if self._reading is not None:
                ending.callback(self._reading.close)
            ending.push_async_callback(asyncio.to_thread, self._writer.close)
            ending.push_async_callback(last)
            ending.push_async_callback(self._compactor.finish)
            self.flush()

    # ------------------------------------------------------------ a trajectory's life

    def add_group(self, prompt: Prompt, size: int) -> Group:
        """A new group of `size` pending trajectories, with ids that no other ever has."""
        first = self._state.counters.next_trajectory
        group_id = self._state.counters.next_group
        ids = range(first, first + size)
        row = GroupRow(
            group_id,
            first,
            size,
            prompt.task,
            json.dumps(prompt.payload),
            prompt.priority,
            np.ascontiguousarray(prompt.token_ids, dtype="<i4").tobytes(),
        )
        self._state.counters.next_trajectory += size
        self._state.counters.next_group += 1
        self._state.counters.prompts += 1
        self._state.groups[group_id] = GroupRecord(group_id, prompt, ids)
        for trajectory_id in ids:
            pending = TrajectoryRow(trajectory_id, group_id)
            self._state.records[trajectory_id] = TrajectoryRecord(pending, ())
            self._writer.put(pending)
        self._counts[TrajectoryState.PENDING] += size
        self._writer.put(row)
        self._writer.put(self._state.counters.to_row())
        return self.load_group(group_id)

    def begin_request(self, trajectory_id: int) -> RequestKey:
        """A pending or partial trajectory runs; only the request returned may append to it."""
        record = self._record(trajectory_id)
        self._turn(record, TrajectoryState.RUNNING)
        record.request = RequestKey(self.lineage, trajectory_id, next(self._serials))
        return record.request

    def end_request(self, request: RequestKey) -> None:
        """Make its trajectory partial. Raises SupersededRequest when it does not run that now."""
        self._turn(running(self._state.records, request), TrajectoryState.PARTIAL)

    def _turn(self, record: TrajectoryRecord, state: TrajectoryState) -> None:
        self._move(record, state)
        self._buffers.flush(record, with_row=True)
        record.author = None

    def append(
        self,
        request: RequestKey,
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike,
        version: PolicyVersion,
        engine_id: str,
        *,
        from_environment: bool = False,
        end: FinishReason | None = None,
        columns: Arrays = (),
    ) -> None:
        """More tokens of a running trajectory, all columns [n]. Never waits for the disk.

        `columns`: the further ones (`trajectory/columns.py`). With `end` they are its last ones;
        that it is finished is committed when `sync` returns.
        Raises SupersededRequest when another request (or none) runs the trajectory now.
        """
        record, trajectory_id = running(self._state.records, request), request.trajectory_id
        arrays: Arrays = (np.array(token_ids, TOKEN_IDS), np.array(logprobs, LOGPROBS))
        if columns:
            arrays = (*arrays, *map(np.array, columns))
        if not len(arrays[0]):
            if end is not None:
                self.end(trajectory_id, end)
            return
        now = time.monotonic()
        types = tuple([column.dtype for column in columns]) if columns else ()
        if record.author != (version, engine_id, from_environment, types):
            self._buffers.flush(record)
            author = PolicyVersion(int(version[0]), int(version[1]))
            record.begin_segment(Author(author, engine_id, from_environment, types))
        if not record.buffered:
            self._buffers.begin(record, now)
        record.add(arrays)
        if end is not None:
            self.end(trajectory_id, end)
        else:
            self._buffers.added(record)
        self._buffers.flush_due(now)

    async def written(self, trajectory_id: int) -> None:
        """Wait until every full chunk of it is committed; usually there is none to wait for.

        A source that awaits this after each `append` is slowed to the pace of the disk and never
        has more than one chunk to lose. Raises ComponentFailure.
        """
        if not self._writer.is_committed(self._record(trajectory_id).in_flight):
            await self.sync()

    def flush(self) -> None:
        """Hand all that is buffered to the writer."""
        self._buffers.flush_all()

    def end(self, trajectory_id: int, reason: FinishReason) -> None:
        """Finish it, or an episode's turn, after its last token. Committed when `sync` returns."""
        record = self._record(trajectory_id)
        if record.turns:
            self.episodes.end_turn(record, reason)
            return
        self._move(record, TrajectoryState.FINISHED, finish_reason=reason.value)
        self._buffers.flush(record, with_row=True)

    async def set_reward(
        self, trajectory_id: int, reward: float, detail: dict[str, float] | None = None
    ) -> None:
        """The (finite) reward of a finished trajectory. Returns when it is committed."""
        record = self._record(trajectory_id)
        self._move(
            record,
            TrajectoryState.SCORED,
            reward=float(reward) + 0.0,  # SQLite has no negative zero
            reward_detail=json.dumps(dict(detail or {})),
        )
        self._writer.put(record.row)
        await self.sync()

    def restart(self, trajectory_id: int) -> None:
        """Forget all its tokens; it is pending again."""
        record = self._record(trajectory_id)
        with self._counted(record):
            record.restart()
        self._buffers.forget(record)
        self._writer.put(record.row)
        for kind in schema.PARTS:
            earlier = f"{schema.TABLES[kind]} WHERE trajectory_id = ? AND attempt < ?"
            self._writer.execute(f"DELETE FROM {earlier}", (trajectory_id, record.row.attempt))

    def drop(self, trajectory_id: int, reason: DropReason) -> None:
        """Take it out of the run, for good and on every lineage."""
        record = self._record(trajectory_id)
        self._move(record, TrajectoryState.DROPPED, drop_reason=reason.value)
        self._buffers.flush(record)
        record.forget_tokens()
        self._writer.put(record.row)

    # ------------------------------------------------------------ batches and checkpoints

    def mark_batched(self, group_ids: Iterable[int], step: int) -> None:
        """Groups, complete and scored but for dropped members, are the batch of update `step`.

        Await `sync` before the trainer may see it. Raises ValueError for anything else, or when
        `step` has a batch already.
        """
        found = self._state.batch_at(step)
        if found is not None and found.drop_reason is None:
            raise ValueError(f"step {step} of lineage {self.lineage} has a batch already")
        groups = map(self._group, group_ids)
        members = [record for group in groups for record in self._state.batch_members(group)]
        ids = pack_ids(record.row.trajectory_id for record in members)
        key = next(self._state.batch_keys) if found is None else found.id
        self._set_batch(BatchRow(key, self.lineage, step, None, ids))
        for record in members:
            with self._counted(record):
                record.batched_step = step
            record.forget_tokens()

    def drop_batch(self, step: int, reason: DropReason) -> int:
        """Drop the batch of `step`, which the trainer could not use; return how many it had."""
        batch = self._state.batch_at(step)
        if batch is None:
            raise LookupError(f"step {step} of lineage {self.lineage} has no batch")
        for trajectory_id in (ids := batch.ids()):
            record = self._record(trajectory_id)
            with self._counted(record):
                record.batched_step = None
                record.move_to(TrajectoryState.DROPPED, drop_reason=reason.value)
            self._writer.put(record.row)
        self._set_batch(batch._replace(drop_reason=reason.value, trajectory_ids=b""))
        return len(ids)

    async def sync(self, *, durable: bool = False) -> int:
        """Wait until everything so far is committed; returns the position.

        `durable`: also on disk, against power loss. Raises ComponentFailure.
        """
        if durable:
            return await self._writer.wait(self._writer.barrier(durable=True))
        return await self._writer.committed()

    def pop_lost_database(self) -> Path | None:
        """The database, once, after somebody has removed or replaced it."""
        if self._loss_reported or not self._writer.lost:
            return None
        self._loss_reported = True
        return self._location.file

    def replicate(self) -> None:
        """Begin to copy what is committed into the run directory; `close` waits for the copy."""
        self._replicator.start()

    def position(self) -> int:
        """Transactions committed so far, for the checkpoint manifest (after `sync`)."""
        return self._writer.position

    async def checkpoint_finalized(self, step: int, kept: Sequence[PolicyVersion]) -> None:
        """The manifest of `step` is on disk, and those of `kept` can still be restored.

        Consumed trajectories are compacted in the background.
        """
        await self._compactor.finish()
        point = PolicyVersion(self.lineage, step)
        self._state.checkpoints.append(point)
        self._writer.put(CheckpointRow(len(self._state.checkpoints), *point, self.position()))
        await self.sync()
        self._compactor.start(sorted({*kept, point}))

    # ------------------------------------------------------------ questions

    def load_trajectory(self, trajectory_id: int) -> Trajectory:
        """Load it with all tokens appended so far. Raises LookupError if it is not in the store."""
        record = self._record(trajectory_id)
        prompt = self._group(record.row.group_id).prompt
        segments, turns = record.segments(), tuple(record.turns)
        if not record.in_memory:
            segments, turns = self._on_disk(record)
        return trajectory_of(record.row, prompt, segments, turns, record.batched_step)

    def response_end(self, trajectory_id: int) -> tuple[int, int | None]:
        """See `TrajectoryRecord.response_end`."""
        return self._record(trajectory_id).response_end()

    def load_group(self, group_id: int) -> Group:
        """Load a group. Raises LookupError when it is not in the store."""
        group = self._group(group_id)
        trajectories = tuple(self.load_trajectory(i) for i in group.trajectory_ids)
        return Group(group_id, group.prompt, trajectories)

    def unconsumed_groups(self) -> list[Group]:
        """Groups with a trajectory that is neither consumed nor dropped, in order of admission."""
        return [self.load_group(group.group_id) for group in self._state.live_groups()]

    def branch_points(self) -> dict[int, int]:
        """Every other lineage -> the policy number at which it parted from this one."""
        return dict(self._branch_points)

    def lag_number(self, version: PolicyVersion) -> int:
        """The policy number of `version` counted along the current lineage."""
        return number_on_lineage(version, self.lineage, self._branch_points)

    @property
    def prompts_read(self) -> int:
        """Prompts read from their source: each group that is not lost took one."""
        return self._state.counters.prompts

    def batch_sizes(self) -> dict[int, int]:
        """Step -> trajectories of its batch along the current lineage that the store still has.

        0 if the trainer dropped the batch; of what compaction has begun to take, only what is left,
        and a batch that it has taken whole is not in there.
        """
        return self._state.batch_sizes()

    def counts(self) -> dict[str, int]:
        """Trajectories by state along the current lineage, exported ones included; O(states)."""
        return dict(self._counts)

    # ------------------------------------------------------------ inside

    def _record(self, trajectory_id: int) -> TrajectoryRecord:
        record = self._state.records.get(trajectory_id)
        if record is None:
            raise LookupError(f"trajectory {trajectory_id} is not in {self._location.file}")
        return record

    def _group(self, group_id: int) -> GroupRecord:
        group = self._state.groups.get(group_id)
        if group is None:
            raise LookupError(f"group {group_id} is not in {self._location.file}")
        return group

    def _move(self, record: TrajectoryRecord, state: TrajectoryState, **changes: Any) -> None:
        with self._counted(record):
            record.move_to(state, **changes)

    @contextmanager
    def _counted(self, record: TrajectoryRecord) -> Iterator[None]:
        """Count its state anew after what is done to it inside."""
        self._counts[record.shown_state] -= 1
        try:
            yield
        finally:
            self._counts[record.shown_state] += 1

    def _set_batch(self, batch: BatchRow) -> None:
        self._state.batches[batch.id] = batch
        self._writer.put(batch)

    def _on_disk(self, record: TrajectoryRecord) -> tuple[tuple[Segment, ...], tuple[Turn, ...]]:
        if not self._writer.is_committed(record.in_flight):
            self._writer.barrier().result(_WAIT_SECONDS)
        if self._reading is None:
            self._reading = schema.connect(self._location.file, read_only=True)
        found = read_tokens(self._reading, record.row)
        return found.segments, found.turns
