"""Runs one step of the processing of weights on a background thread, so that two buckets (tensors
that are sent together) are processed at the same time.

While one bucket is sent, written or loaded on that thread, the caller gathers the next one:

    with BackgroundStage(send) as ahead:
        for bucket in buckets:      # collective: stays on the calling thread
            ahead.put(bucket)

Invariants
- Items are processed in order, one at a time. At most two exist: one that is being processed, and
  one that the caller is making meanwhile.
- An error of the work is raised by the next `put` or at the end of the block, unless the block ends
  with another exception.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class BackgroundStage(Generic[Item]):
    """Runs `work(item)` on a separate thread, for one item after the other.

    `busy_seconds` is the total time in seconds that the thread has spent in `work`.
    """

    def __init__(self, work: Callable[[Item], object]) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="one-ahead")
        self._running: Future[None] | None = None
        self.busy_seconds = 0.0

    def put(self, item: Item) -> None:
        """Wait until the previous item is processed, and raise its error if it failed. Then start
        to process `item` and return."""
        self.wait()
        self._running = self._pool.submit(self._timed, item)

    def wait(self) -> None:
        """Wait until no item is being processed; raise the error of the last one if it failed."""
        running, self._running = self._running, None
        try:
            if running is not None:
                # No time limit is needed here, because the work has one.
                running.result()
        finally:
            # An error of the work refers to this frame and the item. Without `del`, they would form
            # a reference cycle, which keeps the item in memory.
            del running

    def _timed(self, item: Item) -> None:
        began = time.perf_counter()
        try:
            self._work(item)
        finally:
            self.busy_seconds += time.perf_counter() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown(wait=True)
