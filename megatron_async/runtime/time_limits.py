"""Provides time limits that count only the seconds in which this process could run.

A process may be stopped, or get no CPU time, for a while. When it continues, every ordinary time
limit is exceeded, although the messages that it waited for may have arrived and be unread in its
sockets. The senders of these messages must not be blamed for that.

Invariants
- Time is counted in steps of `STEP_SECONDS`. If a step ends at least `STEP_SECONDS` too late, the
  process could not run during it. `AwakeClock` then counts two steps however long it took.
  `AwakeTimeout` then counts nothing and waits for another step.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final

STEP_SECONDS: Final = 0.5
"""Length of the steps in which time is counted."""


class AwakeClock:
    """Clock that counts only time in which an event loop could run.

    The coroutine `run` must be running on that event loop.

    Args:
        clock: Function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The clock's reading at the last tick, and the time of that tick. They are one tuple,
        # because other threads read both and must get values that belong together.
        self._ticked = (0.0, clock())

    def __call__(self) -> float:
        """Return the clock's reading in seconds; only differences of readings have a meaning."""
        awake, since = self._ticked
        return awake + min(self._clock() - since, 2 * STEP_SECONDS)

    def tick(self) -> None:
        """Advance the clock by the time since the last tick, but by 2 * `STEP_SECONDS` at most."""
        self._ticked = (self(), self._clock())

    async def run(self) -> None:
        """Advance the clock every half second until this coroutine is canceled."""
        while True:
            self.tick()
            await asyncio.sleep(STEP_SECONDS)


class AwakeTimeout:
    """Context manager like `asyncio.timeout`, which counts only time in which the loop could run.

    The block is canceled with a TimeoutError after `seconds` in which the event loop could run.
    """

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
        """Restart the time limit. If it limits silence, call this when something is received.

        One step is added to the limit, because the current step, which has partly passed, is
        subtracted in full when it ends.
        """
        self._left = self._seconds + STEP_SECONDS

    def _wait(self) -> None:
        """Schedule a call of `_passed` in `STEP_SECONDS`, or earlier if less time remains."""
        loop = asyncio.get_running_loop()
        step = min(self._left, STEP_SECONDS)
        self._due = loop.time() + step
        self._handle = loop.call_at(self._due, self._passed, step)

    def _passed(self, step: float) -> None:
        """Subtract a step of `step` seconds, which has passed, from the remaining time.

        Then wait for another step, or time out if no time remains. A step that ended at least
        `STEP_SECONDS` too late is not subtracted, because the process could not run during it.
        """
        now = asyncio.get_running_loop().time()
        if now - self._due < STEP_SECONDS:
            self._left -= step
        if self._left > 0:
            self._wait()
        else:
            self._limit.reschedule(now)


class AwakeDeadline:
    """Deadline for blocking code that counts only time in which the process could run.

    The caller must call `tick` every `STEP_SECONDS` or more often, or run its code inside
    `counting`, which does so.
    """

    def __init__(self, seconds: float) -> None:
        self._clock = AwakeClock()
        self._ends = self._clock() + seconds
        self.tick = self._clock.tick

    @property
    def left(self) -> float:
        """Remaining seconds until the deadline; 0 once it has passed."""
        return max(self._ends - self._clock(), 0.0)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Keep the deadline's clock running during this block, from a background thread."""
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
