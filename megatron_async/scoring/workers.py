"""Provides the worker that keeps one scorer process running and scores jobs with it.

A scorer process runs reward functions; a job is a request to score responses by one reward.

Invariants
- Each try to score a job ends within the time limit of its reward, plus the time of a process start
  if one is necessary. A process that hangs is killed, and the next job starts a new process.
- A job whose process died is tried again, so that no response loses its reward because the process
  was killed from outside. Asynchronous jobs share a process. Their last tries run one after the
  other, so that a job that always kills the process does not end the last tries of other jobs. If
  the last try fails, or a try exceeds the time limit, the job gets failed scores, which are counted
  (see `jobs.failed`). Stray packets on the reply socket are counted too (`stray_output`).
- A response never gets the reward of another response, because replies are matched to requests by
  random IDs (see `process`).
- After `close`, no process is left, including processes that a reward function started.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import ProcessKilled
from megatron_async.scoring.frames import ASYNC, BLOCKING
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.jobs import ScoreJob, failed, scores_of
from megatron_async.scoring.process import ScorerCrash, ScorerProcess, ScorerTimeout, StartHangs

TRIES: Final = {BLOCKING: 2, ASYNC: 3}
"""Largest number of tries to score a job if its process dies, by kind of scorer process."""
STARTS: Final = 5
"""Largest number of tries to start a scorer process if it is killed before it is ready."""
_HANGING_STARTS: Final = 2


class ScorerWorker:
    """Scores jobs with one scorer process, which it starts at first use and replaces on failure.

    It belongs to one event loop. A worker for blocking rewards handles one call of `score` at a
    time, a worker for asynchronous rewards many calls concurrently.

    Attributes:
        restarts: Number of scorer processes that were discarded because they failed.
    """

    def __init__(self, settings: ScorerSettings, kind: str = BLOCKING) -> None:
        """Create the worker; start no process yet.

        Args:
            settings: The rewards and their limits.
            kind: `BLOCKING` or `ASYNC`: which of the rewards the worker scores.
        """
        self._settings = settings
        self._kind = kind
        self._process: ScorerProcess | None = None
        self._ready: asyncio.Task[ScorerProcess] | None = None
        self._last_tries = asyncio.Lock()
        self._asynchronous: list[bool] = []
        self._stray = 0
        self._closed = False
        self.restarts = 0

    async def start(self) -> list[bool]:
        """Start the scorer process, unless it runs; return for each reward whether it is async.

        Raises:
            UserError: If the process refuses the settings.
            ComponentFailure: If the process does not start.
        """
        await self._running()
        return self._asynchronous

    async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        """Score each job within its reward's time limit; return the scores of each job's responses.

        A job that times out, or whose process dies on every try, gets failed scores.

        Raises:
            UserError: If a new scorer process refuses the settings.
            ComponentFailure: If a new scorer process does not start.
        """
        done: list[list[ResponseScore]] = []
        crashes, tries = 0, TRIES[self._kind]
        while len(done) < len(work):
            began = time.monotonic()
            last_try = self._kind == ASYNC and crashes == tries - 1
            try:
                async with self._last_tries if last_try else nullcontext():
                    process = await self._running()
                    async for reply in process.stream_replies(work[len(done) :]):
                        now = time.monotonic()
                        done.append(scores_of(self._settings, reply, work[len(done)], now - began))
                        began, crashes = now, 0
            except (ScorerTimeout, ScorerCrash) as error:
                await self._discard()
                crashes += 1
                if isinstance(error, ScorerCrash) and crashes < tries and not self._closed:
                    continue
                seconds = time.monotonic() - began
                done.append(failed(self._settings, error.fault, work[len(done)], seconds, error))
                crashes = 0
        if self._process is not None:
            self._stray += self._process.take_stray()
        if self._stray:
            done[-1][-1].detail["stray_output"] = float(self._stray)
            self._stray = 0
        return done

    def pid(self) -> int | None:
        """Return the ID of the scorer process; None if there is no process."""
        return None if self._process is None else self._process.pid

    def retire(self) -> None:
        """End the idle scorer process in a thread, without waiting for its end."""
        if self._process is not None:
            self._process.stop("the process is no longer needed")
        asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """End the scorer process and all processes that it started; unfinished jobs fail."""
        self._closed = True
        if self._ready is not None:
            self._ready.cancel()
        if self._process is not None:
            self._process.stop("the process was ended")
            self._process.end()

    async def _running(self) -> ScorerProcess:
        """Return a scorer process that accepts requests; start a process if there is none.

        Raises:
            ScorerCrash: If the worker is closed.
        """
        if self._closed:
            raise ScorerCrash("the scorer worker is closed")
        ready = self._ready
        if ready is None or (ready.done() and (ready.exception() or ready.result().closed)):
            ready = self._ready = asyncio.create_task(self._start())
        # This wait needs no time limit, because the start of a process has one.
        return await asyncio.shield(ready)

    async def _start(self) -> ScorerProcess:
        """Start a scorer process, wait until it is ready, and return its handle.

        A start that a signal ended is tried up to `STARTS` times, a start that hangs
        `_HANGING_STARTS` times.
        """
        killed = hanging = 0
        while True:
            await self._discard()
            process = self._process = ScorerProcess(self._settings, self._kind)
            try:
                self._asynchronous = await process.ready()
                return process
            except ProcessKilled:
                killed += 1
                if killed == STARTS:
                    raise
            except StartHangs:
                # Try again: perhaps the process was only stopped from outside, by SIGSTOP.
                hanging += 1
                if hanging == _HANGING_STARTS:
                    raise

    async def _discard(self) -> None:
        """End and forget the current scorer process, if it accepts no more requests."""
        process = self._process
        if process is not None and process.closed:
            self._process = None
            self.restarts += 1
            await process.finish()
            self._stray += process.take_stray()
