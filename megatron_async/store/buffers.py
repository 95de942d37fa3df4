"""Provides `ChunkBuffers`, which decides when buffered tokens are passed to the store's writer.

The buffer of a trajectory is flushed (passed to the writer thread as one chunk) as soon as it has
`CHUNK_TOKENS` tokens, or else `CHUNK_SECONDS` after its first token.

Invariants
- A chunk that is flushed with its trajectory's row is written in one transaction with that row.
- While an event loop runs, a timer flushes buffers that are older than `CHUNK_SECONDS`. Without an
  event loop there is no timer; the next append to any trajectory flushes the old buffers.
"""

import asyncio
import time

from megatron_async.store.records import TrajectoryRecord
from megatron_async.store.writer import StoreWriter
from megatron_async.trajectory.types import CHUNK_TOKENS

# Age in seconds at which a buffer is flushed even if it has fewer tokens than a chunk. This limits
# what is lost of a slowly generated response if the process is killed.
CHUNK_SECONDS = 2.0


class ChunkBuffers:
    """Tracks how long tokens have been in trajectories' buffers, and flushes buffers to the writer.

    To flush a buffer is to pass its tokens to the store's writer thread as one chunk.
    """

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        self._due: dict[int, tuple[float, TrajectoryRecord]] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start_timing(self, record: TrajectoryRecord, now: float) -> None:
        """Record that the empty buffer of `record` gets its first tokens at time `now`."""
        self._due[record.row.trajectory_id] = now, record

    def flush(self, record: TrajectoryRecord, *, with_row: bool = False) -> None:
        """Pass the buffered tokens of trajectory `record` to the writer thread as one chunk.

        Args:
            record: The trajectory. If its buffer is empty, no chunk is written.
            with_row: Whether the trajectory's row (its state) is written too, in the same
                transaction as the chunk.
        """
        self.untrack(record)
        chunk = record.pop_chunk()
        if chunk is not None:
            record.in_flight = self._writer.add_chunk(chunk, record.row if with_row else None)
        elif with_row:
            self._writer.put(record.row)

    def flush_all(self) -> None:
        """Pass the buffered tokens of all trajectories to the writer thread, however few."""
        for _, record in list(self._due.values()):
            self.flush(record)

    def flush_due(self, now: float) -> None:
        """Flush buffers that are `CHUNK_SECONDS` old at time `now`; set a timer if others remain.

        Without a running event loop no timer is set.
        """
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

    def flush_if_full(self, record: TrajectoryRecord) -> None:
        """Flush the buffer of trajectory `record` if it has at least `CHUNK_TOKENS` tokens."""
        if record.buffered >= CHUNK_TOKENS:
            self.flush(record)

    def untrack(self, record: TrajectoryRecord) -> None:
        """Stop tracking the age of the buffer of trajectory `record`, without writing its tokens.

        Call this when that buffer has been flushed or is to be discarded.
        """
        self._due.pop(record.row.trajectory_id, None)

    def close(self) -> None:
        """Cancel the pending flush timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._timer = None
        self.flush_due(time.monotonic())
