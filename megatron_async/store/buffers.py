"""Tokens on their way to the writer: a full chunk at once, any other within `CHUNK_SECONDS`.

Invariants
- What is handed over with a trajectory's row is one transaction with it.
- Nothing waits longer than `CHUNK_SECONDS` while the event loop turns; without a loop the next
  append looks again.
"""

import asyncio
import time

from megatron_async.store.records import TrajectoryRecord
from megatron_async.store.writer import StoreWriter
from megatron_async.trajectory.types import CHUNK_TOKENS

# Longest time that fewer tokens than a chunk wait: what a slow response loses to a kill.
CHUNK_SECONDS = 2.0


class ChunkBuffers:
    """Trajectories whose buffers hold tokens, in the order in which these came."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._due: dict[int, tuple[float, TrajectoryRecord]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, record: TrajectoryRecord, now: float) -> None:
        """Note the time at which an empty buffer gets tokens."""
        self._due[record.row.trajectory_id] = now, record

    def flush(self, record: TrajectoryRecord, *, with_row: bool = False) -> None:
        """Hand over what is buffered; `with_row`: and what is stored of it, as one transaction."""
        self.forget(record)
        chunk = record.take_chunk()
        if chunk is not None:
            record.in_flight = self._writer.add_chunk(chunk, record.row if with_row else None)
        elif with_row:
            self._writer.put(record.row)

    def flush_all(self) -> None:
        """Hand over all that is buffered."""
        for _, record in list(self._due.values()):
            self.flush(record)

    def flush_due(self, now: float) -> None:
        """Hand over what has waited for long enough, and come back for what is waiting still."""
        while self._due:
            since, record = next(iter(self._due.values()))
            if now - since < CHUNK_SECONDS:
                break
            self.flush(record)
        if self._due and self._timer is None:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                return
            self._timer = loop.call_later(CHUNK_SECONDS, self._on_timer)

    def added(self, record: TrajectoryRecord) -> None:
        """Hand over the buffer of `record` if it holds a chunk."""
        if record.buffered >= CHUNK_TOKENS:
            self.flush(record)

    def forget(self, record: TrajectoryRecord) -> None:
        """Leave it out: its buffer is empty again, or no longer wanted."""
        self._due.pop(record.row.trajectory_id, None)

    def close(self) -> None:
        """Come back for nothing more."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.flush_due(time.monotonic())
