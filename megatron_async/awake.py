"""Limits of time that leave out what this process did not live through.

A process that was stopped or starved finds every limit passed when it goes on, and what it had been
waiting for unread in its sockets. That is no evidence about whoever was to answer.

Invariants
- Time is counted in steps. Of a step that ends much too late, no more than two are counted by the
  clock, and none by the limit, which waits for it again.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

STEP_SECONDS: Final = 0.5


class AwakeClock:
    """Seconds for which an event loop has run, as long as `run` runs on it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked = (0.0, clock())  # one object: it is read on other threads

    def __call__(self) -> float:
        """Return a reading in seconds; only differences have a meaning."""
        awake, since = self._ticked
        return awake + min(self._clock() - since, 2 * STEP_SECONDS)

    def tick(self) -> None:
        """Count what has passed since the last one."""
        self._ticked = (self(), self._clock())

    async def run(self) -> None:
        """Tick for ever."""
        while True:
            self.tick()
            await asyncio.sleep(STEP_SECONDS)


@asynccontextmanager
async def awake_timeout(seconds: float) -> AsyncIterator[None]:
    """`asyncio.timeout` for time that the event loop has run."""
    loop = asyncio.get_running_loop()
    handle: asyncio.TimerHandle

    def wait(left: float) -> asyncio.TimerHandle:
        step = min(left, STEP_SECONDS)
        due = loop.time() + step
        return loop.call_at(due, passed, left, step, due)

    def passed(left: float, step: float, due: float) -> None:
        nonlocal handle
        now = loop.time()
        if now - due < STEP_SECONDS:
            left -= step
        if left > 0:
            handle = wait(left)
        else:
            limit.reschedule(now)

    async with asyncio.timeout(None) as limit:
        handle = wait(seconds)
        try:
            yield
        finally:
            handle.cancel()


class AwakeDeadline:
    """The end of a limit for code that blocks; somebody must `tick`, or `counting` does."""

    def __init__(self, seconds: float) -> None:
        self._clock = AwakeClock()
        self._ends = self._clock() + seconds
        self.tick = self._clock.tick

    @property
    def left(self) -> float:
        """Seconds until then; 0 when it has passed."""
        return max(self._ends - self._clock(), 0.0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Tick on a thread for as long as this lasts."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(STEP_SECONDS):
                self.tick()

        thread = threading.Thread(target=tick, name="awake", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
