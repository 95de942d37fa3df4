"""Scorers in processes of their own, with a hard limit on every score.

Invariants
- A try ends within its limit (plus a process start, where one is due): a process that hangs is
  killed and the next score starts another one.
- A score whose process died is asked for once more: a kill from outside must not cost a response
  its reward. What failed for good is settled in `work`, and counted; so is what else came on
  the reply channel (`stray_output`).
- A reward belongs to the response that was asked for (see `process`).
- Closing leaves no process behind, also none that a scorer started.

`ScorerWorker` owns one process and blocks; `LocalScorerPool` runs several from threads of this
process, `PlacedScorerPool` one on whichever machine has room, both as many as their queue needs
(`pool`). Asynchronous rewards have one process for all (`waiting`).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, Final

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import ComponentFailure, ProcessKilled, UserError
from megatron_async.places.place import UNLIMITED, Place, Placed, PlacedLost, R
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.pool import ScorerPool
from megatron_async.scoring.process import (
    START_TIMEOUT_SECONDS,
    ScorerCrash,
    ScorerProcess,
    ScorerTimeout,
    StartHangs,
)
from megatron_async.scoring.work import Work, failed, scores_of

_SLACK_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.2
_TRIES: Final = 2  # of a score: a second crash is its own doing
_STARTS: Final = 5  # of a process that is killed again and again
_HANGING_STARTS: Final = 2


class ScorerWorker:
    """A scorer process: started when first needed, replaced when it hangs or dies.

    Not for several threads at once.
    """

    def __init__(self, settings: ScorerSettings) -> None:
        self._settings = settings
        self._process: ScorerProcess | None = None
        self._asynchronous: list[bool] = []
        self._stray = 0
        self.restarts = 0

    def start(self) -> list[bool]:
        """Have a process ready; which rewards are asynchronous, and not for this worker.

        Raises UserError, or ComponentFailure if it does not start.
        """
        if self._process is not None and not self._process.alive():
            self._discard()
        left, hanging = _STARTS, _HANGING_STARTS
        while self._process is None:
            process = ScorerProcess(self._settings)
            try:
                self._asynchronous = process.ready()
                self._process = process
            except ProcessKilled:  # before it was ready
                left -= 1
                if not left:
                    raise
                self.restarts += 1
            except StartHangs:  # somebody may have stopped it
                hanging -= 1
                if not hanging:
                    raise
                self.restarts += 1
        return self._asynchronous

    def score(self, work: Sequence[Work]) -> list[list[ResponseScore]]:
        """Score each piece of work within its limit. Raises what `start` does."""
        done: list[list[ResponseScore]] = []
        crashes = 0
        while len(done) < len(work):
            began = time.monotonic()
            try:
                self.start()
                assert self._process is not None
                for reply in self._process.ask(work[len(done) :]):
                    now = time.monotonic()
                    done.append(scores_of(self._settings, reply, work[len(done)], now - began))
                    began, crashes = now, 0
            except (ScorerTimeout, ScorerCrash) as error:
                self._discard()
                crashes += 1
                if isinstance(error, ScorerCrash) and crashes < _TRIES:
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

    def close(self) -> None:
        """End the process and all that it started."""
        if self._process is not None:
            self._stray += self._process.take_stray()
            self._process.end()
            self._process = None

    def _discard(self) -> None:
        self.close()
        self.restarts += 1


class _LocalWorker:
    """A scorer process, driven by one thread of this process."""

    def __init__(self, settings: ScorerSettings) -> None:
        self.worker = ScorerWorker(settings)
        self._thread = ThreadPoolExecutor(1, "scorer")

    async def start(self) -> list[bool]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.worker.start)

    async def score(self, work: Sequence[Work]) -> list[list[ResponseScore]]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.worker.score, work)

    def retire(self) -> None:
        self._thread.submit(self.worker.close)
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.worker.close()


class LocalScorerPool(ScorerPool):
    """Up to `task.scorer_workers` processes, driven by as many threads of this process."""

    def __init__(self, settings: ScorerSettings, model_path: str) -> None:
        super().__init__(settings, model_path, lambda: _LocalWorker(settings))


async def scored(
    settings: ScorerSettings, jobs: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
) -> list[list[ResponseScore]]:
    """Score the texts of each job, (payload of a prompt, responses), by a pool that ends then."""
    pool = LocalScorerPool(settings, model_path="")
    try:
        return await asyncio.gather(*(pool.score_texts(*job) for job in jobs))
    finally:
        pool.close()


class PlacedWorker(_LocalWorker):
    """A worker whose process starts before it is needed, while engines do."""

    def __init__(self, settings: ScorerSettings) -> None:
        super().__init__(settings)
        with suppress(UserError, ComponentFailure):  # `score` meets it again
            self.worker.start()


class _Placed:
    """A worker in a process of the place, asked again when that has died."""

    def __init__(self, placed: Placed[PlacedWorker], limit_seconds: float) -> None:
        self._placed = placed
        self._limit = limit_seconds

    async def start(self) -> list[bool]:
        return await self._ask(1, lambda worker: worker.start())

    async def score(self, work: Sequence[Work]) -> list[list[ResponseScore]]:
        return await self._ask(len(work), lambda worker: worker.score(work))

    async def _ask(self, pieces: int, what: Callable[[PlacedWorker], Awaitable[R]]) -> R:
        limit = pieces * self._limit + _SLACK_SECONDS
        for left in reversed(range(_STARTS)):
            try:
                return await self._placed.call(what, limit=limit)
            except PlacedLost:
                if not left:
                    raise
            except UserError as error:
                raise ComponentFailure(str(error)) from error
            await asyncio.sleep(_RETRY_SECONDS)
        raise AssertionError

    def retire(self) -> None:
        self._placed.end()

    close = retire  # the process ends with its worker


class PlacedScorerPool(ScorerPool):
    """Up to `task.scorer_workers` workers, each in a process of `place`."""

    def __init__(self, settings: ScorerSettings, model_path: str, place: Place) -> None:
        longest = max(map(settings.limit_seconds, settings.parts))
        limit = _TRIES * (longest + START_TIMEOUT_SECONDS)
        start = partial(place.start, PlacedWorker, settings, name="scorer", restarts=UNLIMITED)
        super().__init__(settings, model_path, lambda: _Placed(start(), limit))


def scorer_pool(settings: ScorerSettings, model_path: str, place: Place) -> ScorerPool:
    """The pool of a run: on one machine nothing stands between it and its scorer processes."""
    if place.one_machine:
        return LocalScorerPool(settings, model_path)
    return PlacedScorerPool(settings, model_path, place)
