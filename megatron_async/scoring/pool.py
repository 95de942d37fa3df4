"""Pools of scorers whose number follows the queue: of this process, and of a place.

Invariants
- A worker has as many pieces of work at a time as it does in `_HELD_SECONDS`, one where a piece
  takes longer: messages are few, and no response waits for another's slow score in a worker while
  a second worker has none. Work is done in the order in which it came.
- As many workers exist as `count` asks for, at least one. One that is busy is never taken
  away.
- Asynchronous rewards go to one process for all of them, which starts when the first is due.
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
from megatron_async.scoring.frames import BLOCKING, WAITING
from megatron_async.scoring.interface import SCORER_FAULTS, ResponseScore, Score
from megatron_async.scoring.jobs import ScoreJob, combine_scores, split
from megatron_async.scoring.process import START_TIMEOUT_SECONDS
from megatron_async.scoring.workers import STARTS, TRIES, ScorerWorker
from megatron_async.trajectory.types import Prompt

_SLACK_SECONDS: Final = 30.0
_RETRY_SECONDS: Final = 0.2
_HELD_SECONDS: Final = 0.05
_MOST_HELD: Final = 256


class Worker(Protocol):
    """A scorer, wherever it runs."""

    async def start(self) -> list[bool]:
        """Have it ready; which rewards are asynchronous."""

    async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        """Score each piece within its limit."""

    def retire(self) -> None:
        """End it without waiting; it is idle."""

    def close(self) -> None:
        """End it, also while it scores."""


class ScorerPool:
    """Workers made by `start`, at most `task.scorer_workers`. For one event loop."""

    def __init__(
        self,
        settings: ScorerSettings,
        model_path: str,
        start: Callable[[], Worker],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._start = start
        self._clock = clock
        self._model_path = model_path
        self._queue: deque[tuple[ScoreJob, asyncio.Future[list[ResponseScore]]]] = deque()
        self._idle: list[Worker] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._waits: list[bool] | None = None
        if not any(part.own for part in settings.parts):
            self._waits = [part.name in ASYNCHRONOUS for part in settings.parts]
        self._for_waiting = ScorerWorker(settings, WAITING)
        self._gates = [asyncio.Semaphore(part.concurrency) for part in settings.parts]
        self.size = ScorerCount(settings.task.scorer_workers)
        self.failures: dict[str, str] = {}
        self._logs = f" (log: {settings.logs}/scorer-*.log)" if settings.logs else ""
        self.workers: list[Worker] = []
        if self._waits is None or not all(self._waits):
            self._add()

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        """Reward (`None`: it failed, and that is not a 0) and details.

        Raises ComponentFailure when a worker gives no answer at all.
        """
        (score,) = await self.score_group(prompt, [response_ids])
        return score

    async def score_group(self, prompt: Prompt, responses: Sequence[Sequence[int]]) -> list[Score]:
        """The same for several responses to one prompt, as rewards with `group: true` need it."""
        texts = [self._text(ids) for ids in responses]
        scores = await self.score_texts(prompt.payload, texts)
        return [(score.reward, score.detail) for score in scores]

    async def score_texts(
        self, payload: Mapping[str, Any], texts: Sequence[str]
    ) -> list[ResponseScore]:
        """The same for responses that are text already; `payload` is the prompt's."""
        work = split(self._settings, payload, texts)
        waits = await self._asynchronous()
        found = await asyncio.gather(
            *(
                self._score_waiting(piece) if waits[piece.part] else self._score(piece)
                for piece in work
            )
        )
        for score in itertools.chain.from_iterable(found):
            for failure in score.failures:  # of one reward, which has one fault
                kind = SCORER_FAULTS[next(iter(score.detail))]
                self.failures.setdefault(kind, failure + self._logs)
        return combine_scores(self._settings, work, found)

    def close(self) -> None:
        """End all processes; scores that wait are given up."""
        self._for_waiting.close()
        for worker in self.workers:
            worker.close()

    @cached_property
    def _text(self) -> Callable[[Sequence[int]], str]:
        """Function that turns tokens into text; it loads the tokenizer when it is first needed."""
        from megatron_async.tasks.text_task import load_tokenizer, response_text, stop_tokens

        tokenizer = load_tokenizer(self._model_path)
        return partial(
            response_text,
            tokenizer,
            stop_token_ids=stop_tokens(self._model_path, tokenizer),
            skip_special=self._settings.task.skip_special_tokens,
        )

    async def _asynchronous(self) -> list[bool]:
        """List which rewards are; for the user's a scorer process looks."""
        if self._waits is None:
            self._waits = await self.workers[0].start()
        return self._waits

    async def _score_waiting(self, work: ScoreJob) -> list[ResponseScore]:
        async with self._gates[work.part]:
            (scores,) = await self._for_waiting.score([work])
        return scores

    async def _score(self, work: ScoreJob) -> list[ResponseScore]:
        done: asyncio.Future[list[ResponseScore]] = asyncio.get_running_loop().create_future()
        self._queue.append((work, done))
        self._waiting += 1
        try:
            self._follow_queue()
            return await done  # bounded: every worker's call is
        finally:
            self._waiting -= 1

    def _follow_queue(self) -> None:
        self.size = scorer_count.queued(self.size, self._waiting, self._clock())
        while len(self.workers) < self.size.count:
            self._add()
        while len(self.workers) > self.size.count and self._idle and not self._queue:
            worker = self._idle.pop()
            self.workers.remove(worker)
            worker.retire()
        while self._queue and self._idle:
            pieces = [self._queue.popleft() for _ in range(self._share())]
            task = asyncio.get_running_loop().create_task(self._run(self._idle.pop(0), pieces))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _share(self) -> int:
        """Number of pieces that the next idle worker takes."""
        seconds = self.size.seconds
        most = int(min(_HELD_SECONDS / seconds, _MOST_HELD)) if seconds else 1
        return max(1, min(most, len(self._queue) // len(self.workers)))

    async def _run(
        self, worker: Worker, pieces: Sequence[tuple[ScoreJob, asyncio.Future[list[ResponseScore]]]]
    ) -> None:
        try:
            found = await worker.score([work for work, _ in pieces])
        except Exception as error:  # noqa: BLE001 - it reaches everyone who waits for it
            for _, done in pieces:
                if not done.done():
                    done.set_exception(error)
        else:
            for (_, done), scores in zip(pieces, found, strict=True):
                self.size = scorer_count.scored(self.size, scores[0].seconds)
                if not done.done():
                    done.set_result(scores)
        finally:
            self._idle.append(worker)
        self._follow_queue()

    def _add(self) -> None:
        worker = self._start()
        self.workers.append(worker)
        self._idle.append(worker)


class LocalScorerPool(ScorerPool):
    """Up to `task.scorer_workers` processes of this machine."""

    def __init__(self, settings: ScorerSettings, model_path: str) -> None:
        super().__init__(settings, model_path, lambda: ScorerWorker(settings))


async def scored(
    settings: ScorerSettings, jobs: Sequence[tuple[Mapping[str, Any], Sequence[str]]]
) -> list[list[ResponseScore]]:
    """Score the texts of each job, (payload of a prompt, responses), by a pool that ends then."""
    pool = LocalScorerPool(settings, model_path="")
    try:
        return await asyncio.gather(*(pool.score_texts(*job) for job in jobs))
    finally:
        pool.close()


class _RemoteWorker:
    """A worker in a process of the place, asked again when that has died."""

    def __init__(self, remote: RemoteObject[ScorerWorker], limit_seconds: float) -> None:
        self._placed = remote
        self._limit = limit_seconds

    async def start(self) -> list[bool]:
        return await self._ask(1, lambda worker: worker.start())

    async def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        return await self._ask(len(work), lambda worker: worker.score(work))

    async def _ask(self, pieces: int, what: Callable[[ScorerWorker], Awaitable[R]]) -> R:
        limit = pieces * self._limit + _SLACK_SECONDS
        for left in reversed(range(STARTS)):
            try:
                return await self._placed.call(what, limit=limit)
            except RemoteObjectLost:
                if not left:
                    raise
            except UserError as error:
                raise ComponentFailure(str(error)) from error
            await asyncio.sleep(_RETRY_SECONDS)
        raise AssertionError

    def retire(self) -> None:
        self._placed.end()

    close = retire  # the process ends with its worker


class RemoteScorerPool(ScorerPool):
    """Up to `task.scorer_workers` workers, each in a process of `place`."""

    def __init__(self, settings: ScorerSettings, model_path: str, backend: ProcessBackend) -> None:
        longest = max(map(settings.limit_seconds, settings.parts))
        limit = TRIES[BLOCKING] * (longest + START_TIMEOUT_SECONDS)
        start = partial(backend.start, ScorerWorker, settings, name="scorer", restarts=UNLIMITED)
        super().__init__(settings, model_path, lambda: _RemoteWorker(start(), limit))


def scorer_pool(settings: ScorerSettings, model_path: str, backend: ProcessBackend) -> ScorerPool:
    """The pool of a run: on one machine nothing stands between it and its scorer processes."""
    if backend.one_machine:
        return LocalScorerPool(settings, model_path)
    return RemoteScorerPool(settings, model_path, backend)
