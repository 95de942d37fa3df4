"""Scorers in processes of their own, with a hard limit on every score.

Invariants
- A try ends within its limit (plus a process start, where one is due): a process that hangs is
  killed and the next score starts another one.
- A score whose process died is asked for once more: a kill from outside must not cost a response
  its reward. What failed for good is settled in `scorer_work`, and counted; so is what else came on
  the reply channel (`stray_output`).
- A reward belongs to the response that was asked for (see `scorer_process`).
- Closing leaves no process behind, also none that a scorer started.

`ScorerWorker` owns one process and blocks; `LocalScorerPool` runs several from threads of this
process, `RayScorerPool` one in each of several Ray actors, both as many as their queue needs
(`scorer_pool`). Asynchronous rewards have one process for all (`waiting_scorer`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import ComponentFailure, ProcessKilled, UserError
from megatron_async.scoring.pool import ScorerPool
from megatron_async.scoring.process import (
    START_TIMEOUT_SECONDS,
    ScorerCrash,
    ScorerProcess,
    ScorerTimeout,
)
from megatron_async.scoring.work import Work, failed, scores_of
from megatron_async.tasks.base import ResponseScore

_RAY_SLACK_SECONDS: Final = 30.0
_TRIES: Final = 2  # of a score: a second crash is its own doing
_STARTS: Final = 5  # of a process that is killed again and again


class ScorerWorker:
    """A scorer process: started when first needed, replaced when it hangs or dies.

    Not for several threads at once. Plain enough for `ray.remote`.
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
        left = _STARTS
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
    """Up to `task.verifier_workers` processes, driven by as many threads of this process."""

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


class _RayWorker:
    """A Ray actor with one scorer process."""

    def __init__(self, actor: Any, limit_seconds: float) -> None:
        self.actor = actor
        self._limit = limit_seconds
        # The process starts while the engines do, or before it is needed. An error of the start
        # is met again by `score`.
        actor.start.remote()

    async def start(self) -> list[bool]:
        return await self._answer(self.actor.start.remote(), 1)  # type: ignore[no-any-return]

    async def score(self, work: Sequence[Work]) -> list[list[ResponseScore]]:
        return await self._answer(self.actor.score.remote(work), len(work))  # type: ignore[no-any-return]

    async def _answer(self, result: Any, pieces: int) -> Any:
        from ray.exceptions import RayActorError, RayTaskError

        limit = pieces * self._limit + _RAY_SLACK_SECONDS
        try:
            # Not `wait_for`: until Python 3.12 it may give a result although it is cancelled.
            async with asyncio.timeout(limit):
                return await result
        except TimeoutError as error:
            raise ComponentFailure(f"a scorer actor gave no answer within {limit:.0f} s") from error
        except RayTaskError as error:
            if isinstance(error.cause, ComponentFailure | UserError):
                raise ComponentFailure(str(error.cause)) from error
            raise
        except RayActorError as error:
            raise ComponentFailure(f"a scorer actor died: {error}") from error

    def retire(self) -> None:
        import ray

        ray.kill(self.actor)

    close = retire  # the process ends with the actor


class RayScorerPool(ScorerPool):
    """Up to `task.verifier_workers` Ray actors, each with one scorer process. Needs a running Ray.

    `label_selector`: Ray nodes on which they may be.
    """

    def __init__(
        self,
        settings: ScorerSettings,
        model_path: str,
        label_selector: dict[str, str] | None = None,
    ) -> None:
        import ray

        longest = max(map(settings.limit_seconds, settings.parts))
        limit = _TRIES * (longest + START_TIMEOUT_SECONDS)
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=_STARTS)(ScorerWorker)
        actor = actor.options(label_selector=label_selector)
        start = actor.remote
        super().__init__(settings, model_path, lambda: _RayWorker(start(settings), limit))
