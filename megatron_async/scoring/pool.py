"""Provides pools of scorer workers, whose number follows the length of the queue.

A worker starts and calls one scorer process, which runs the reward functions. The workers of a
`LocalScorerPool` are objects of this process. The workers of a `RemoteScorerPool` are in processes
that a backend starts.

Invariants
- A worker gets as many jobs at once as it can be expected to finish in `_BATCH_SECONDS`, or one job
  if a job takes longer. So short jobs need few messages, and a job rarely waits behind a slow one
  while another worker is idle. Jobs are started in the order in which they arrived.
- The number of workers is the `count` that `autoscale` computes, and at least one. A busy worker is
  never removed.
- All asynchronous rewards run in one additional scorer process, which starts with the first
  asynchronous job.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Final, Protocol

from megatron_async.config.reward import ASYNCHRONOUS, ScorerSettings
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.process_backends.backend import (
    UNLIMITED,
    ProcessBackend,
    R,
    RemoteObject,
    RemoteObjectLost,
)
from megatron_async.scoring import autoscale as scorer_count
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.scoring.frames import ASYNC, BLOCKING
from megatron_async.scoring.interface import SCORER_FAULTS, ResponseScore, Score
from megatron_async.scoring.jobs import ScoreJob, combine_scores, split
from megatron_async.scoring.process import START_TIMEOUT_SECONDS
from megatron_async.scoring.workers import STARTS, TRIES, ScorerWorker
from megatron_async.trajectory.types import Prompt

_SLACK_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.2
_BATCH_SECONDS: Final = 0.05
_MAX_BATCH: Final = 256


class Worker(Protocol):
    """Protocol of an object that scores jobs with one scorer process, local or remote."""

    async def start(self) -> list[bool]:
        """Start the scorer process unless it runs; return for each reward whether it is async."""

    async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        """Score each job within its time limit; return the scores of each job's responses."""

    def retire(self) -> None:
        """End the idle scorer process without waiting for its end."""

    def close(self) -> None:
        """End the scorer process, even while it scores."""


class ScorerPool:
    """Scores responses with up to `task.scorer_workers` workers, which it starts and ends.

    It belongs to one event loop.

    Attributes:
        size: State of the automatic sizing: the number of workers and the mean time of a score.
        failures: First error message of each kind of failure, by the metric that counts the kind.
        workers: The current workers, without the one for asynchronous rewards.
    """

    def __init__(
        self,
        settings: ScorerSettings,
        model_path: str,
        start: Callable[[], Worker],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the pool and its first worker; start no scorer process yet.

        Args:
            settings: The rewards and their limits.
            model_path: Folder with the tokenizer that turns responses into text.
            start: Returns a new worker.
            clock: Returns the current time in seconds.
        """
        self._settings = settings
        self._start = start
        self._clock = clock
        self._model_path = model_path
        self._queue: deque[tuple[ScoreJob, asyncio.Future[list[ResponseScore]]]] = deque()
        self._idle: list[Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._is_async: list[bool] | None = None
        if not any(reward.own for reward in settings.parts):
            self._is_async = [reward.name in ASYNCHRONOUS for reward in settings.parts]
        self._async_worker = ScorerWorker(settings, ASYNC)
        self._concurrency = [asyncio.Semaphore(reward.concurrency) for reward in settings.parts]
        self.size = ScorerCount(settings.task.scorer_workers)
        self.failures: dict[str, str] = {}
        self._logs = f" (log: {settings.logs}/scorer-*.log)" if settings.logs else ""
        self.workers: list[Worker] = []
        if self._is_async is None or not all(self._is_async):
            self._add()

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        """Score one response to `prompt`, given as token IDs; return its reward and details.

        The reward is None if scoring failed and the trajectory is to be dropped.

        Raises:
            UserError: If a local scorer process refuses the settings.
            ComponentFailure: If a worker cannot start its scorer process or cannot be reached.
        """
        (score,) = await self.score_group(prompt, [response_ids])
        return score

    async def score_group(self, prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[Score]:
        """Score several responses to one prompt together; return reward and details of each.

        Rewards with the setting `group: true` see all responses in one call.
        """
        texts = [self._text(ids) for ids in responses]
        scores = await self.score_texts(prompt.payload, texts)
        return [(score.reward, score.detail) for score in scores]

    async def score_texts(
        self, payload: Mapping[str, Any], texts: Sequence[str]
    ) -> list[ResponseScore]:
        """Score responses given as text by all rewards; return the total score of each response.

        `payload` holds the prompt's question, reference answer and other columns. The first error
        message of each kind of failure is kept in `failures`.
        """
        work = split(self._settings, payload, texts)
        is_async = await self._asynchronous()
        found = await asyncio.gather(
            *(self._score_async(job) if is_async[job.part] else self._score(job) for job in work)
        )
        for score in itertools.chain.from_iterable(found):
            # The first key of a failed score's `detail` is the kind of the failure (`jobs.failed`).
            for failure in score.failures:
                kind = SCORER_FAULTS[next(iter(score.detail))]
                self.failures.setdefault(kind, failure + self._logs)
        return combine_scores(self._settings, work, found)

    def close(self) -> None:
        """End all scorer processes; unfinished scores fail."""
        self._async_worker.close()
        for worker in self.workers:
            worker.close()

    @cached_property
    def _text(self) -> Callable[[Sequence[int]], str]:
        """Function that turns a response's token IDs into text.

        The tokenizer is loaded at the first use, because `score_texts` does not need it.
        """
        from megatron_async.tasks.text_task import load_tokenizer, response_text, stop_tokens

        tokenizer = load_tokenizer(self._model_path)
        return partial(
            response_text,
            tokenizer,
            stop_token_ids=stop_tokens(self._model_path, tokenizer),
            skip_special=self._settings.task.skip_special_tokens,
        )

    async def _asynchronous(self) -> list[bool]:
        """Return for each reward whether it is asynchronous.

        If the user's own rewards are among them, the first worker's scorer process finds that out,
        because the user's code is imported only in scorer processes.
        """
        if self._is_async is None:
            self._is_async = await self.workers[0].start()
        return self._is_async

    async def _score_async(self, job: ScoreJob) -> list[ResponseScore]:
        """Score the responses of one job by its asynchronous reward; return their scores.

        At most the reward's `concurrency` jobs run at once.
        """
        async with self._concurrency[job.part]:
            (scores,) = await self._async_worker.score([job])
        return scores

    async def _score(self, job: ScoreJob) -> list[ResponseScore]:
        """Score the responses of one job by its blocking reward; return their scores.

        The job is queued, and the number of workers is adapted to the queue.
        """
        done: asyncio.Future[list[ResponseScore]] = asyncio.get_running_loop().create_future()
        self._queue.append((job, done))
        self._waiting += 1
        try:
            self._follow_queue()
            # This wait needs no time limit, because every call to a worker has one.
            return await done
        finally:
            self._waiting -= 1

    def _follow_queue(self) -> None:
        """Adapt the number of workers to the queue, and send queued jobs to idle workers."""
        self.size = scorer_count.queued(self.size, self._waiting, self._clock())
        while len(self.workers) < self.size.count:
            self._add()
        while len(self.workers) > self.size.count and self._idle and not self._queue:
            worker = self._idle.pop()
            self.workers.remove(worker)
            worker.retire()
        while self._queue and self._idle:
            jobs = [self._queue.popleft() for _ in range(self._batch_size())]
            task = asyncio.get_running_loop().create_task(self._run(self._idle.pop(0), jobs))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _batch_size(self) -> int:
        """Return the number of queued jobs that the next idle worker gets, at least one.

        A worker gets at most its equal share of the queue, and at most as many jobs as take
        `_BATCH_SECONDS` together. It gets one job if the time of a job is not known yet.
        """
        seconds = self.size.seconds
        most = int(min(_BATCH_SECONDS / seconds, _MAX_BATCH)) if seconds else 1
        return max(1, min(most, len(self._queue) // len(self.workers)))

    async def _run(
        self, worker: Worker, jobs: Sequence[tuple[ScoreJob, asyncio.Future[list[ResponseScore]]]]
    ) -> None:
        """Score jobs with an idle worker, set the result of each job's future, free the worker."""
        try:
            found = await worker.score([job for job, _ in jobs])
        except Exception as error:  # noqa: BLE001 - raised to the caller of every job
            for _, done in jobs:
                if not done.done():
                    done.set_exception(error)
        else:
            for (_, done), scores in zip(jobs, found, strict=True):
                self.size = scorer_count.scored(self.size, scores[0].seconds)
                if not done.done():
                    done.set_result(scores)
        finally:
            self._idle.append(worker)
        self._follow_queue()

    def _add(self) -> None:
        """Create one more worker, which is idle."""
        worker = self._start()
        self.workers.append(worker)
        self._idle.append(worker)


class LocalScorerPool(ScorerPool):
    """Scores with up to `task.scorer_workers` scorer processes that are children of this process.

    One more scorer process runs the asynchronous rewards.
    """

    def __init__(self, settings: ScorerSettings, model_path: str) -> None:
        super().__init__(settings, model_path, lambda: ScorerWorker(settings))


async def scored(
    settings: ScorerSettings, jobs: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
) -> list[list[ResponseScore]]:
    """Score the responses of each job with a temporary local pool; return their scores by job.

    Args:
        settings: The rewards and their limits.
        jobs: Pairs of a prompt's payload and the texts of the responses to the prompt.
    """
    pool = LocalScorerPool(settings, model_path="")
    try:
        return await asyncio.gather(*(pool.score_texts(*job) for job in jobs))
    finally:
        pool.close()


class _RemoteWorker:
    """Calls a `ScorerWorker` in another process; repeats a call during which that process died."""

    def __init__(self, remote: RemoteObject[ScorerWorker], limit_seconds: float) -> None:
        self._remote = remote
        self._limit = limit_seconds

    async def start(self) -> list[bool]:
        """Let the remote worker start its process; return for each reward whether it is async."""
        return await self._call(1, lambda worker: worker.start())

    async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        """Score the jobs with the remote worker; return the scores of each job's responses."""
        return await self._call(len(work), lambda worker: worker.score(work))

    async def _call(self, jobs: int, what: Callable[[ScorerWorker], Awaitable[R]]) -> R:
        """Call `what` with the remote worker and return the result; repeat it if its process dies.

        There are up to `STARTS` tries. The time limit of a try is the time limit of `jobs` jobs,
        one after the other, plus `_SLACK_SECONDS`.

        Raises:
            RemoteObjectLost: If the process died on every try.
            ComponentFailure: If the call raises a UserError.
        """
        limit = jobs * self._limit + _SLACK_SECONDS
        for tries_left in reversed(range(STARTS)):
            try:
                return await self._remote.call(what, limit=limit)
            except RemoteObjectLost:
                if not tries_left:
                    raise
            except UserError as error:
                raise ComponentFailure(str(error)) from error
            await asyncio.sleep(_RETRY_SECONDS)
        raise AssertionError

    def retire(self) -> None:
        """End the remote worker's process, and so its scorer process."""
        self._remote.end()

    # `retire` kills the worker's process, with which its scorer process ends even while it scores.
    # That is also what `close` must do.
    close = retire


class RemoteScorerPool(ScorerPool):
    """Scores with up to `task.scorer_workers` workers, each in a process that `backend` starts."""

    def __init__(self, settings: ScorerSettings, model_path: str, backend: ProcessBackend) -> None:
        longest = max(map(settings.limit_seconds, settings.parts))
        limit = TRIES[BLOCKING] * (longest + START_TIMEOUT_SECONDS)
        start = partial(backend.start, ScorerWorker, settings, name="scorer", restarts=UNLIMITED)
        super().__init__(settings, model_path, lambda: _RemoteWorker(start(), limit))


def scorer_pool(settings: ScorerSettings, model_path: str, backend: ProcessBackend) -> ScorerPool:
    """Return the pool of scorers for a run whose processes `backend` starts.

    On one machine the scorer processes are direct children of this process. Otherwise each worker
    is in a process of the backend, on any node.
    """
    if backend.one_machine:
        return LocalScorerPool(settings, model_path)
    return RemoteScorerPool(settings, model_path, backend)
