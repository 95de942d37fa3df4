"""Runs compaction in the background, a few groups for each transaction.

Invariants
- Neither commits nor the event loop wait for it: lines are made on a thread with a connection of
  its own, and what the writer's thread does for it is done in pieces of milliseconds.
- One compaction at a time; its error is raised by the next `finish`, which everybody calls before
  the next one starts and before the store is closed.
- Every piece is limited in time, and so is `finish`. A thread that still writes lines after its
  limit keeps the store locked to its end: nobody else appends to the file meanwhile.
- What is in memory is forgotten after the removal is committed, never before.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from megatron_async.config.rollout import StoreConfig
from megatron_async.disk import reason
from megatron_async.errors import ComponentFailure
from megatron_async.store import compaction as export
from megatron_async.store.place import StorePlace
from megatron_async.store.schema import connect
from megatron_async.store.state import StoreState
from megatron_async.store.writer import StoreWriter
from megatron_async.trajectory.types import PolicyVersion

_CHUNKS_PER_REMOVAL = 2048  # removed in about 5 ms; a larger group is removed whole all the same
T = TypeVar("T")


class Compactor:
    """Takes out of a store's state and file what no restorable checkpoint needs."""

    def __init__(
        self, place: StorePlace, state: StoreState, writer: StoreWriter, settings: StoreConfig
    ) -> None:
        self._place, self._state, self._writer = place, state, writer
        self._after = settings.compact_after_checkpoints
        self._file = place.export_file if settings.export == "jsonl" else None
        self._task: asyncio.Task[None] | None = None

    def start(self, kept: Sequence[int | PolicyVersion]) -> None:
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
                    f"trajectory store {self._place.file} cannot be compacted: {reason(error)}"
                ) from error

    async def _compact(self, kept: Sequence[int | PolicyVersion]) -> None:
        state = self._state
        now = export.Situation(
            tree=state.tree,
            lineage=state.lineage,
            batches=list(state.batches.values()),
            checkpoints=list(state.checkpoints),
            groups={group_id: group.trajectory_ids for group_id, group in state.groups.items()},
            dropped={
                record.trajectory_id: record.drop_reason.value
                for record in state.records.values()
                if record.drop_reason is not None
            },
        )
        whole = await asyncio.to_thread(export.plan, now, kept, self._after)
        for groups in self._pieces(whole.groups):
            change = export.removal(
                groups,
                whole,
                groups=now.groups,
                batches=state.batches,
                dropped=now.dropped,
                exported=state.exported,
            )
            if self._file is not None:
                length = await self._write_lines(change, self._file)
                change = replace(change, exported=replace(change.exported, bytes=length))
            await self._run(partial(export.apply_removal, change=change))
            state.exported = change.exported
            state.batches.update((batch.id, batch) for batch in change.batches)
            for group_id in change.groups:
                for trajectory_id in state.groups.pop(group_id).trajectory_ids:
                    del state.records[trajectory_id]
        while await self._run(export.give_back_pages):
            pass

    def _pieces(self, groups: Sequence[int]) -> Iterator[list[int]]:
        """Groups that are removed together."""
        piece: list[int] = []
        chunks = 0
        for group_id in groups:
            piece.append(group_id)
            members = self._state.groups[group_id].trajectory_ids
            chunks += sum(self._state.records[i].chunks for i in members)
            if chunks >= _CHUNKS_PER_REMOVAL:
                yield piece
                piece, chunks = [], 0
        if piece:
            yield piece

    async def _write_lines(self, change: export.Removal, file: Path) -> int:
        lock = self._writer.share_lock()

        def write() -> int:
            with (
                closing(lock),
                closing(connect(self._place.file, read_only=True)) as connection,
            ):
                return export.write_lines(connection, change, file)

        try:
            async with asyncio.timeout(self._writer.stall_seconds):
                return await asyncio.to_thread(write)
        except TimeoutError as error:
            raise ComponentFailure(
                f"export {file} took no line for {self._writer.stall_seconds:g} s"
            ) from error

    async def _run(self, job: Callable[[sqlite3.Connection], T]) -> T:
        """On the writer's thread; what waits to be committed goes first."""
        return await self._writer.wait(self._writer.run(job))
