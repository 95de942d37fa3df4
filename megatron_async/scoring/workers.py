"""Scorers in processes of their own, with a hard limit on every score.

Invariants
- A try ends within its limit (plus a process start, where one is due): a process that hangs is
  killed and the next score starts another one.
- A score whose process died is asked for again: a kill from outside must not cost a response its
  reward. Where others are under way in the process, the last try has it for itself: the score that
  ends the process must not cost the others their reward. What failed for good is settled in
  `work`, and counted; so is what else came on the reply channel (`stray_output`).
- A reward belongs to the response that was asked for (see `process`).
- Closing leaves no process behind, also none that a scorer started.
"""

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Final

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import ProcessKilled
from megatron_async.scoring.frames import BLOCKING, WAITING
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.jobs import ScoreJob, failed, scores_of
from megatron_async.scoring.process import ScorerCrash, ScorerProcess, ScorerTimeout, StartHangs

TRIES: Final = {BLOCKING: 2, WAITING: 3}
"""Number of times that a score is asked for whose process dies."""
STARTS: Final = 5
"""Number of starts of a process that is killed again and again."""
_HANGING_STARTS: Final = 2


class ScorerWorker:
    """A scorer process: started when first needed, replaced when it hangs or dies.

    It belongs to one event loop. With blocking rewards it scores the work of one call at a time,
    with asynchronous rewards the work of many calls at once.
    """

    def __init__(self, settings: ScorerSettings, kind: str = BLOCKING) -> None:
        self._settings = settings
        self._kind = kind
        self._process: ScorerProcess | None = None
        self._ready: asyncio.Task[ScorerProcess] | None = None
        self._alone = asyncio.Lock()
        self._asynchronous: list[bool] = []
        self._stray = 0
        self._closed = False
        self.restarts = 0

    async def start(self) -> list[bool]:
        """Have a process ready; which rewards are asynchronous.

        Raises UserError, or ComponentFailure if it does not start.
        """
        await self._running()
        return self._asynchronous

    async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        """Score each piece of work within its limit. Raises what `start` does."""
        done: list[list[ResponseScore]] = []
        crashes, tries = 0, TRIES[self._kind]
        while len(done) < len(work):
            began = time.monotonic()
            last = self._kind == WAITING and crashes == tries - 1
            try:
                async with self._alone if last else nullcontext():
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
        """Process id of the scorer, while there is one."""
        return None if self._process is None else self._process.pid

    def retire(self) -> None:
        """End the process without waiting; it is idle."""
        if self._process is not None:
            self._process.stop("it is not needed")
        asyncio.get_running_loop().run_in_executor(None, self.close)

    def close(self) -> None:
        """End the process and all that it started; scores that wait for it have crashed."""
        self._closed = True
        if self._ready is not None:
            self._ready.cancel()
        if self._process is not None:
            self._process.stop("it ended")
            self._process.end()

    async def _running(self) -> ScorerProcess:
        """The process, which is started where none can be asked. Raises ScorerCrash once closed."""
        if self._closed:
            raise ScorerCrash("it is closed")
        ready = self._ready
        if ready is None or (ready.done() and (ready.exception() or ready.result().closed)):
            ready = self._ready = asyncio.create_task(self._start())
        return await asyncio.shield(ready)  # bounded: a process start is

    async def _start(self) -> ScorerProcess:
        killed = hanging = 0
        while True:
            await self._discard()
            process = self._process = ScorerProcess(self._settings, self._kind)
            try:
                self._asynchronous = await process.ready()
                return process
            except ProcessKilled:  # before it was ready
                killed += 1
                if killed == STARTS:
                    raise
            except StartHangs:  # somebody may have stopped it
                hanging += 1
                if hanging == _HANGING_STARTS:
                    raise

    async def _discard(self) -> None:
        """End a process that can be asked no more."""
        process = self._process
        if process is not None and process.closed:
            self._process = None
            self.restarts += 1
            await process.finish()
            self._stray += process.take_stray()
