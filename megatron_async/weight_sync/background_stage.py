"""Double buffering: while one bucket is sent, written or loaded, the next one is gathered.

    with BackgroundStage(send) as ahead:
        for bucket in buckets:      # collective: stays on the calling thread
            ahead.put(bucket)

Invariants
- Items are worked on in order, one at a time; at most one is in work while the caller makes the
  next, so at most two exist.
- An error of the work is raised by the next `put` or at the end of the block, never lost.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class BackgroundStage(Generic[Item]):
    """Runs `work(item)` on a thread of its own; `busy_seconds` is how long that thread worked."""

    def __init__(self, work: Callable[[Item], object]) -> None:
        self._work = work
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="one-ahead")
        self._running: Future[None] | None = None
        self.busy_seconds = 0.0

    def put(self, item: Item) -> None:
        """Wait for the item before; raises what its work raised. Then begin this one."""
        self.wait()
        self._running = self._pool.submit(self._timed, item)

    def wait(self) -> None:
        """Wait until nothing is in work."""
        running, self._running = self._running, None
        try:
            if running is not None:
                running.result()  # bounded: every work has a limit of its own
        finally:
            del running  # else an error of the work, this frame and the item hold each other

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
