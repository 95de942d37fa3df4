"""Scorers in processes of their own, with a hard limit on every score.

Invariants
- A try ends within `task.verifier_timeout_seconds` (plus a process start, where one is due): a
  process that hangs is killed and the next score starts another one.
- A score whose process died is asked for once more: a kill from outside must not cost a response
  its reward. One that timed out, or crashed twice, is treated as `task.on_verifier_timeout` says;
  one whose scorer raised or returned NaN gets reward 0. Each kind is counted in the score's
  `detail`, and so is what else came on the reply channel (`stray_output`).
- A reward belongs to the response that was asked for (see `scorer_process`).
- Closing leaves no process behind, also none that a scorer started.

`VerifierWorker` owns one process and blocks; `LocalVerifierPool` runs several from threads of this
process, `RayVerifierPool` one in each of several Ray actors, both as many as their queue needs
(`scorer_pool`).
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Final

from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import ComponentFailure, ProcessKilled, UserError
from megatron_async.tasks.base import Judgement
from megatron_async.tasks.scorer_pool import ScorerPool
from megatron_async.tasks.scorer_process import (
    START_TIMEOUT_SECONDS,
    ScorerCrash,
    ScorerProcess,
    ScorerTimeout,
)

_RAY_SLACK_SECONDS: Final = 30.0
_TRIES: Final = 2  # of a score: a second crash is its own doing
_STARTS: Final = 5  # of a process that is killed again and again


class VerifierWorker:
    """One scorer process: started when first needed, replaced when it hangs or dies.

    Not for several threads at once. Plain enough for `ray.remote`.
    """

    def __init__(self, config: TaskConfig) -> None:
        self._config = config
        self._process: ScorerProcess | None = None
        self._stray = 0
        self._spent = 0.0
        self.restarts = 0

    def start(self) -> None:
        """Have a process ready. Raises UserError, or ComponentFailure if it does not start."""
        if self._process is not None and not self._process.alive():
            self._discard()
        if self._process is None:
            self._process = self._started()

    def _started(self) -> ScorerProcess:
        """A new process; one that is killed before it is ready is followed by another."""
        for left in reversed(range(_STARTS)):
            process = ScorerProcess(self._config)
            try:
                process.ready()
                break
            except ProcessKilled:
                if not left:
                    raise
                self.restarts += 1
        return process

    def judge(self, payload: dict[str, Any], text: str) -> Judgement:
        """The score, within the limit. Raises only what `start` does."""
        self._spent = 0.0
        score = replace(self._score({"payload": payload, "text": text}), seconds=self._spent)
        if self._process is not None:
            self._stray += self._process.take_stray()
        if self._stray:
            score.detail["stray_output"] = float(self._stray)
            self._stray = 0
        return score

    def _score(self, request: dict[str, Any]) -> Judgement:
        for _ in range(_TRIES):
            try:
                reply = self._ask(request)
                break
            except ScorerTimeout:
                return self._failed("verifier_timeout")
            except ScorerCrash:
                continue
        else:
            return self._failed("verifier_crash")
        if "error" in reply:
            return Judgement(0.0, {"score": 0.0, "answered": 1.0, "verifier_error": 1.0})
        return Judgement(reply["reward"], reply["detail"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The reply. After ScorerTimeout or ScorerCrash there is no process."""
        self.start()
        assert self._process is not None
        began = time.monotonic()
        try:
            return self._process.ask(request, self._config.verifier_timeout_seconds)
        except (ScorerTimeout, ScorerCrash):
            self._discard()
            raise
        finally:
            self._spent += time.monotonic() - began

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

    def _failed(self, kind: str) -> Judgement:
        reward = 0.0 if self._config.on_verifier_timeout == "zero" else None
        return Judgement(reward, {"score": 0.0, "answered": 1.0, kind: 1.0})


class _LocalWorker:
    """A scorer process, driven by one thread of this process."""

    def __init__(self, config: TaskConfig) -> None:
        self.worker = VerifierWorker(config)
        self._thread = ThreadPoolExecutor(1, "scorer")

    async def judge(self, payload: dict[str, Any], text: str) -> Judgement:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.worker.judge, payload, text)

    def retire(self) -> None:
        self._thread.submit(self.worker.close)
        self._thread.shutdown(wait=False)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self.worker.close()


class LocalVerifierPool(ScorerPool[_LocalWorker]):
    """Up to `task.verifier_workers` processes, driven by as many threads of this process."""

    def __init__(self, config: TaskConfig, model_path: str) -> None:
        super().__init__(config.verifier_workers, model_path, lambda: _LocalWorker(config))

    def close(self) -> None:
        """End all processes; scores that wait are given up, running ones end first."""
        for worker in self.workers:
            worker.close()


class _RayWorker:
    """A Ray actor with one scorer process."""

    def __init__(self, actor: Any, limit_seconds: float) -> None:
        self.actor = actor
        self._limit = limit_seconds
        # The process starts while the engines do, or before it is needed. An error of the start
        # is met again by `judge`.
        actor.start.remote()

    async def judge(self, payload: dict[str, Any], text: str) -> Judgement:
        from ray.exceptions import RayActorError, RayTaskError

        try:
            # Not `wait_for`: until Python 3.12 it may give a result although it is cancelled.
            async with asyncio.timeout(self._limit):
                return await self.actor.judge.remote(payload, text)  # type: ignore[no-any-return]
        except TimeoutError as error:
            raise ComponentFailure(
                f"a scorer actor gave no answer within {self._limit:.0f} s"
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, ComponentFailure | UserError):
                raise ComponentFailure(str(error.cause)) from error
            raise
        except RayActorError as error:
            raise ComponentFailure(f"a scorer actor died: {error}") from error

    def retire(self) -> None:
        import ray

        ray.kill(self.actor)


class RayVerifierPool(ScorerPool[_RayWorker]):
    """Up to `task.verifier_workers` Ray actors, each with one scorer process. Needs a running Ray.

    `label_selector`: Ray nodes on which they may be.
    """

    def __init__(
        self, config: TaskConfig, model_path: str, label_selector: dict[str, str] | None = None
    ) -> None:
        import ray

        one_try = config.verifier_timeout_seconds + START_TIMEOUT_SECONDS
        limit = _TRIES * one_try + _RAY_SLACK_SECONDS
        actor = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=_STARTS)(VerifierWorker)
        actor = actor.options(label_selector=label_selector)
        start = actor.remote
        super().__init__(
            config.verifier_workers, model_path, lambda: _RayWorker(start(config), limit)
        )

    def close(self) -> None:
        """End all actors and, with them, their processes."""
        for worker in self.workers:
            worker.retire()
        self.workers = []
