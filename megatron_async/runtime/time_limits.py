"""Limits of time that count only the seconds in which this process could run.

A process that was stopped or starved finds every limit passed when it continues, and what it had
waited for unread in its sockets. That does not count against the peer.

Invariants
- Time is counted in steps. Of a step that ends much too late, no more than two are counted by the
  clock, and none by the limit, which waits for it again.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
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


class AwakeTimeout:
    """`asyncio.timeout` for time that the event loop has run."""

    def __init__(self, seconds: float) -> None:
        self._seconds = self._left = seconds
        self._limit = asyncio.timeout(None)
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> "AwakeTimeout":
        await self._limit.__aenter__()
        self._wait()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._handle is not None:
            self._handle.cancel()
        await self._limit.__aexit__(kind, error, trace)

    def restart(self) -> None:
        """Begin anew, but for the step under way: of a limit of silence, something was heard."""
        self._left = self._seconds + STEP_SECONDS

    def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        step = min(self._left, STEP_SECONDS)
        self._due = loop.time() + step
        self._handle = loop.call_at(self._due, self._passed, step)

    def _passed(self, step: float) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._due < STEP_SECONDS:
            self._left -= step
        if self._left > 0:
            self._wait()
        else:
            self._limit.reschedule(now)


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
