"""Runs compaction in the background of the event loop, a few groups for each transaction.

Invariants
- One compaction at a time; its error is raised by the next `finish`, which everybody calls before
  the next one starts and before the store is closed.
- Every removal is limited in time (`StoreWriter.wait`), and so is `finish`.
- What is in memory is forgotten after the removal is committed, never before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron_async.config.rollout import StoreConfig
from megatron_async.trajectory import store_export as export
from megatron_async.trajectory.store_state import StoreState
from megatron_async.trajectory.store_writer import StoreWriter
from megatron_async.trajectory.types import PolicyVersion

_GROUPS_PER_REMOVAL = 16


class Compactor:
    """Takes out of a store's state and file what no restorable checkpoint needs."""

    def __init__(
        self, state: StoreState, writer: StoreWriter, settings: StoreConfig, export_file: Path
    ) -> None:
        self._state, self._writer = state, writer
        self._after = settings.compact_after_checkpoints
        self._file = export_file if settings.export == "jsonl" else None
        self._task: asyncio.Task[None] | None = None

    def start(self, kept: Sequence[int | PolicyVersion]) -> None:
        """Begin, with the checkpoints that can still be restored."""
        self._task = asyncio.create_task(self._compact(kept))

    async def finish(self) -> None:
        """Wait for the one that runs, if any. Raises what stopped it."""
        if self._task is not None:
            task, self._task = self._task, None
            await task

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
        for start in range(0, len(whole.groups), _GROUPS_PER_REMOVAL):
            change = export.removal(
                whole.groups[start : start + _GROUPS_PER_REMOVAL],
                whole,
                groups=now.groups,
                batches=state.batches,
                dropped=now.dropped,
                exported=state.exported,
            )
            job = partial(export.apply_removal, change=change, export_file=self._file)
            state.exported = await self._writer.wait(self._writer.run(job))
            state.batches.update((batch.id, batch) for batch in change.batches)
            for group_id in change.groups:
                for trajectory_id in state.groups.pop(group_id).trajectory_ids:
                    del state.records[trajectory_id]
