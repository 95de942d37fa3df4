"""Provides `TrajectoryStore`, which durably stores every token of a run and what is trained on it.

Invariants
- Only one process writes (a lock file keeps other processes out), and it writes through one thread;
  `append` and the other methods that are not `async` only change memory. Other processes read the
  store through `StoreReader`.
- When `sync` returns, all earlier changes except tokens that are still buffered are committed and
  survive the death of any process. If the caller awaits `written` after each `append`, a killed
  process loses at most the current chunk of a running trajectory.
- The end of a trajectory is in one transaction with its last tokens (`append(..., end=...)`), so
  that no later process can find these tokens without the end and generate more.
- No column stores whether a trajectory is consumed (trained). It is computed: a batch records the
  lineage and the step for which it was made, and it counts as consumed at a checkpoint if that step
  is on the sequence of updates to the checkpoint (see `lineage`). So a resume from any kept
  checkpoint sees the right batches, although it changes no batch and only adds a lineage.
- Ids only grow and are never used twice.
- Only one request at a time may add tokens to a trajectory: `append` and `end_request` refuse every
  request but the current one. So when a request has been replaced by another one, tokens that its
  stream still delivers are refused.
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
    """Stores the groups, trajectories, batches and checkpoints of one run, in memory and durably.

    All methods must be called on one thread, that of the event loop. Use `open` to get a store and
    `episodes` to write the turns of episodes.
    """

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
        """Open a run's store for writing, and begin or continue a lineage; return the store.
        A lineage is the part of a run from a start or resume to the next resume.

        Trajectories that were running become partial, and trajectories that were batched at `step`
        or later on the path to the new lineage become scored again. A missing store is created. A
        damaged database is replaced by its replica, and `recovery` then says what is lost.

        Args:
            path: The store's name, RUN/trajectories.sqlite; the database may be elsewhere
                (`location`).
            settings: The section `store` of the run's settings.
            lineage: Number of the lineage; a number that the store already has must be its newest.
            step: Policy number at which the lineage begins or continues; on a resume, the step of
                the restored checkpoint.
            parent: On a resume, the lineage of the restored checkpoint; None means the newest
                lineage.
            position: On a resume, the value of `position()` that the checkpoint's manifest has;
                after a restart of the rollout manager, the `store_position` of the newest batch
                that the trainer has received, if it has one; None if unknown.

        Raises:
            UserError: The store cannot be opened, is in use, or cannot continue that checkpoint.
        """
        settings = settings or StoreConfig()
        location = prepared_location(Path(path), settings.directory)
        lock = lock_store(location.file)
        try:
            state = load_state(
                location, lineage=lineage, step=step, parent=parent, position=position
            )
            if state.recovery is not None:
                logger.warning("%s", state.recovery.message)
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
        """Start the writer thread for a store that `open` has loaded; only `open` calls this."""
        self._location, self._settings, self._state = location, settings, state
        self._branch_points = state.tree.branch_points(state.lineage)
        # The counts are updated with every change of a state, so that the status of a run, which is
        # queried often, need not count all trajectories.
        self._counts = state.counts()
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
        """Number of the current lineage."""
        return self._state.lineage

    @property
    def recovery(self) -> Recovery | None:
        """Recovery that opening the store required; None if the database was usable."""
        return self._state.recovery

    @property
    def export_file(self) -> Path:
        """Path of the JSONL file to which compaction moves old trajectories from the database."""
        return self._location.export_file

    async def close(self, *, leave: bool = False) -> None:
        """Write everything that is buffered, end compaction and replication, and close the store.

        Args:
            leave: Whether the run may continue on another node. A database outside the run
                directory is then copied to the replica and deleted.

        Raises:
            ComponentFailure: Writing or compaction failed, or the writer thread does not end in
                time; the store then stays locked until that thread ends.
        """
        self._buffers.close()
        last = (
            self._replicator.replicate_finally
            if leave and self._location.is_external
            else self._replicator.finish
        )
        # The steps run from the last to the first, and each runs even if another step fails.
        async with AsyncExitStack() as ending:
            ending.callback(self._replicator.leave)
            if self._reading is not None:
                ending.callback(self._reading.close)
            ending.push_async_callback(asyncio.to_thread, self._writer.close)
            ending.push_async_callback(last)
            ending.push_async_callback(self._compactor.finish)
            self.flush()

    # ------------------------------------------------------------ a trajectory's states

    def add_group(self, prompt: Prompt, size: int) -> Group:
        """Add a group of `size` pending trajectories for `prompt`; return the group.

        The ids of the group and its trajectories have never been used before.
        """
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
        """Set a pending, partial or waiting trajectory to running; return its new request's key.

        Only this request may append tokens to the trajectory from now on.

        Raises:
            LookupError: The trajectory is not in the store.
            ValueError: The trajectory is in another state.
        """
        record = self._record(trajectory_id)
        self._move_and_flush(record, TrajectoryState.RUNNING)
        record.request = RequestKey(self.lineage, trajectory_id, next(self._serials))
        return record.request

    def end_request(self, request: RequestKey) -> None:
        """End a request that did not complete its response; its trajectory becomes partial.

        Raises:
            SupersededRequest: `request` is not the current request of the trajectory.
        """
        self._move_and_flush(running(self._state.records, request), TrajectoryState.PARTIAL)

    def _move_and_flush(self, record: TrajectoryRecord, state: TrajectoryState) -> None:
        """Change the state of a trajectory; pass its row and its buffered tokens to the writer
        thread, which commits them in one transaction.

        Tokens that are appended later belong to a new segment.
        """
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
        """Append tokens to the trajectory of `request`, without waiting for the disk.

        The tokens are buffered, and are passed to the writer thread with the next full chunk. Only
        when the writer's queue is full does the call block.

        Args:
            request: The trajectory's current request.
            token_ids: Ids of the tokens [n].
            logprobs: Their log-probs [n].
            version: Policy version that generated the tokens.
            engine_id: Engine that generated the tokens.
            from_environment: Whether the environment wrote the tokens.
            end: Reason why the response (or the turn of an episode) ends with these tokens; None if
                it does not end. The end is committed once a later `sync` returns.
            columns: The columns beyond token ids and log-probs, each [n] (`trajectory/columns.py`).

        Raises:
            SupersededRequest: `request` is not the current request of its trajectory.
            ComponentFailure: The writer has failed, or its queue stays full.
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
            self._buffers.start_timing(record, now)
        record.add(arrays)
        if end is not None:
            self.end(trajectory_id, end)
        else:
            self._buffers.flush_if_full(record)
        self._buffers.flush_due(now)

    async def written(self, trajectory_id: int) -> None:
        """Wait until every chunk of the trajectory that was passed to the writer is committed.

        Usually there is nothing to wait for. A caller that awaits this method after each `append`
        cannot append faster than the disk writes, so that a killed process loses at most one chunk
        of each trajectory.

        Raises:
            LookupError: The trajectory is not in the store.
            ComponentFailure: The writer fails or is too slow.
        """
        if not self._writer.is_committed(self._record(trajectory_id).in_flight):
            await self.sync()

    def flush(self) -> None:
        """Pass all buffered tokens to the writer thread, without waiting for their commit."""
        self._buffers.flush_all()

    def end(self, trajectory_id: int, reason: FinishReason) -> None:
        """End the response of a trajectory with `reason`; the trajectory becomes finished.

        If the trajectory is an episode, its newest turn ends instead, and the episode becomes
        waiting (for its environment). The last tokens must have been appended. The end is committed
        once a later `sync` returns.
        """
        record = self._record(trajectory_id)
        if record.turns:
            self.episodes.end_turn(record, reason)
            return
        self._move(record, TrajectoryState.FINISHED, finish_reason=reason.value)
        self._buffers.flush(record, with_row=True)

    async def set_reward(
        self, trajectory_id: int, reward: float, detail: dict[str, float] | None = None
    ) -> None:
        """Store the reward of a finished trajectory, which becomes scored, and wait for the commit.

        Args:
            trajectory_id: The trajectory.
            reward: The reward, a finite number.
            detail: Components of the reward by name.
        """
        record = self._record(trajectory_id)
        self._move(
            record,
            TrajectoryState.SCORED,
            reward=float(reward) + 0.0,  # Adding 0.0 turns -0.0, which SQLite lacks, into 0.0.
            reward_detail=json.dumps(dict(detail or {})),
        )
        self._writer.put(record.row)
        await self.sync()

    def restart(self, trajectory_id: int) -> None:
        """Reset a trajectory to pending; delete its tokens and turns, in memory and database.

        Raises:
            LookupError: The trajectory is not in the store.
            ValueError: The trajectory is dropped or consumed.
        """
        record = self._record(trajectory_id)
        with self._counted(record):
            record.restart()
        self._buffers.untrack(record)
        self._writer.put(record.row)
        for kind in schema.PART_KEYS:
            earlier = f"{schema.TABLES[kind]} WHERE trajectory_id = ? AND attempt < ?"
            self._writer.execute(f"DELETE FROM {earlier}", (trajectory_id, record.row.attempt))

    def drop(self, trajectory_id: int, reason: DropReason) -> None:
        """Drop a trajectory from the run for `reason`, permanently and on every lineage.

        Raises:
            LookupError: The trajectory is not in the store.
            ValueError: The trajectory is dropped or consumed already.
        """
        record = self._record(trajectory_id)
        self._move(record, TrajectoryState.DROPPED, drop_reason=reason.value)
        self._buffers.flush(record)
        record.forget_tokens()
        self._writer.put(record.row)

    # ------------------------------------------------------------ batches and checkpoints

    def mark_batched(self, group_ids: Iterable[int], step: int) -> None:
        """Record that these groups are the batch of update `step` on the current lineage.

        The batch contains all trajectories of the groups that are not dropped, and they must be
        scored. Await `sync(durable=True)` before the trainer gets the batch.

        Raises:
            LookupError: A group is not in the store.
            ValueError: A trajectory is neither scored nor dropped, or is in a batch already; or
                `step` already has a batch that was not dropped.
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
        """Drop the batch of update `step` and all its trajectories; return how many there are.

        This is for a batch that the trainer cannot use.

        Returns:
            The number of trajectories in the batch.

        Raises:
            LookupError: The current lineage has no batch of this step.
        """
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
        """Wait until every change passed to the writer so far is committed to the database.

        Tokens that are still in a trajectory's buffer are not included (see `flush`).

        Args:
            durable: Whether the commits must also be on disk, so that they survive a power loss.

        Returns:
            The position, which is the number of transactions ever committed.

        Raises:
            ComponentFailure: The writer fails or is too slow.
        """
        if durable:
            return await self._writer.wait(self._writer.barrier(durable=True))
        return await self._writer.committed()

    def pop_lost_database(self) -> Path | None:
        """Return the path of the database once its file was removed or replaced; otherwise None.

        Only the first call after the loss returns the path; later calls return None.
        """
        if self._loss_reported or not self._writer.database_replaced:
            return None
        self._loss_reported = True
        return self._location.file

    def replicate(self) -> None:
        """Start copying the committed database to its replica in the run directory.

        The copy is made in the background. `close` waits for the copy.
        """
        self._replicator.start()

    def position(self) -> int:
        """Return the number of transactions ever committed, which a checkpoint manifest records."""
        return self._writer.position

    async def checkpoint_finalized(self, step: int, kept: Sequence[PolicyVersion]) -> None:
        """Record that the checkpoint of `step` is finalized; start to remove old trajectories.

        This compaction runs in the background. It moves trajectories that no restorable checkpoint
        needs from the database to the export file, or only deletes them with `store.export: none`.
        This method waits for the record to be committed and for an earlier compaction to end, not
        for the new one. Call it once the checkpoint's manifest is on disk.

        Args:
            step: Step of the checkpoint, which this start or resume of the run (the current
                lineage) has saved.
            kept: All checkpoints that can still be restored; trajectories that they need are not
                removed from the database.

        Raises:
            ComponentFailure: The writer or the earlier compaction failed.
        """
        await self._compactor.finish()
        point = PolicyVersion(self.lineage, step)
        self._state.checkpoints.append(point)
        self._writer.put(CheckpointRow(len(self._state.checkpoints), *point, self.position()))
        await self.sync()
        self._compactor.start(sorted({*kept, point}))

    # ------------------------------------------------------------ questions

    def load_trajectory(self, trajectory_id: int) -> Trajectory:
        """Return a trajectory with all tokens appended so far and its turns.

        Tokens that are not in memory are read from the database.

        Raises:
            LookupError: The trajectory is not in the store.
        """
        record = self._record(trajectory_id)
        prompt = self._group(record.row.group_id).prompt
        segments, turns = record.segments(), tuple(record.turns)
        if not record.in_memory:
            segments, turns = self._on_disk(record)
        return trajectory_of(record.row, prompt, segments, turns, record.batched_step)

    def response_end(self, trajectory_id: int) -> tuple[int, int | None]:
        """Return the number of tokens of a trajectory's response, and its last token id.

        For an episode, the response is that of its newest turn. None instead of the id means that
        there is no token, or that the environment wrote the last token.
        """
        return self._record(trajectory_id).response_end()

    def load_group(self, group_id: int) -> Group:
        """Return a group with all its trajectories and their tokens.

        Raises:
            LookupError: The group is not in the store.
        """
        group = self._group(group_id)
        trajectories = tuple(self.load_trajectory(i) for i in group.trajectory_ids)
        return Group(group_id, group.prompt, trajectories)

    def unconsumed_groups(self) -> list[Group]:
        """Return the groups with a trajectory that is neither batched nor dropped, oldest first.

        Batched means in a batch of the current lineage, or of one that it continues.
        """
        return [self.load_group(group.group_id) for group in self._state.live_groups()]

    def branch_points(self) -> dict[int, int]:
        """Return, for every other lineage, the last policy number at which it has the same weights
        as the current lineage.

        A lineage is the part of the run from a start or resume to the next resume.
        """
        return dict(self._branch_points)

    def lag_number(self, version: PolicyVersion) -> int:
        """Return the policy number from which the lag of the tokens of `version` is counted.

        For a version of the current lineage this is its own number. Another lineage has the same
        weights as the current lineage up to the last policy number that both share; a later number
        counts as that shared number.
        """
        return number_on_lineage(version, self.lineage, self._branch_points)

    @property
    def prompts_read(self) -> int:
        """Number of prompts that have been read from the prompt source, one for each group.

        Prompts of groups that were lost with a damaged database are not counted, so that they are
        read again.
        """
        return self._state.counters.prompts

    def batch_sizes(self) -> dict[int, int]:
        """Return, by step, the size of each batch of the current lineage or one that it continues.

        The size is the number of trajectories, which is 0 for a batch that the trainer dropped.
        Trajectories that compaction removed are not counted, and a batch of which it removed all
        trajectories is left out.
        """
        return self._state.batch_sizes()

    def counts(self) -> dict[str, int]:
        """Return the number of trajectories in each state on the current lineage, in constant time.

        Trajectories that compaction removed are counted.
        """
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
        """Keep the counts by state correct when the block changes the state of `record`."""
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
