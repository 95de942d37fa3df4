"""A pool of scorers whose number follows the queue: what the local and the Ray pool share.

Invariants
- A worker has one response at a time; responses are scored in the order in which they came.
- As many workers exist as `scorer_count` asks for, at least one. One that is busy is never taken
  away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from megatron_async.tasks import scorer_count
from megatron_async.tasks.base import Judgement
from megatron_async.tasks.scorer_count import ScorerCount
from megatron_async.trajectory.types import Prompt


class Worker(Protocol):
    """One scorer, wherever it runs."""

    async def judge(self, payload: dict[str, Any], text: str) -> Judgement:
        """The score, within a limit."""
        ...

    def retire(self) -> None:
        """End it without waiting; it is idle."""
        ...


W = TypeVar("W", bound=Worker)


class ScorerPool(Generic[W]):
    """Workers made by `start`, at most `most`. For one event loop."""

    def __init__(
        self,
        most: int,
        model_path: str,
        start: Callable[[], W],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._start = start
        self._clock = clock
        self._decoder = _ResponseDecoder(model_path)
        self._idle: asyncio.Queue[W] = asyncio.Queue()
        self._waiting = 0
        self.scorers = ScorerCount(most)
        self.workers: list[W] = []
        self._add()

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        """Reward (`None`: it failed, and that is not a 0) and details.

        Raises ComponentFailure when a worker gives no answer at all.
        """
        text = self._decoder.text(response_ids)
        self._waiting += 1
        try:
            self._follow_queue()
            worker = await self._idle.get()  # bounded: every holder gives its worker back
            try:
                score = await worker.judge(prompt.payload, text)
            finally:
                self._idle.put_nowait(worker)
        finally:
            self._waiting -= 1
        if score.seconds:
            self.scorers = scorer_count.scored(self.scorers, score.seconds)
        self._follow_queue()
        return score.reward, score.detail

    def _follow_queue(self) -> None:
        self.scorers = scorer_count.queued(self.scorers, self._waiting, self._clock())
        while len(self.workers) < self.scorers.count:
            self._add()
        while len(self.workers) > self.scorers.count and not self._idle.empty():
            worker = self._idle.get_nowait()
            self.workers.remove(worker)
            worker.retire()

    def _add(self) -> None:
        worker = self._start()
        self.workers.append(worker)
        self._idle.put_nowait(worker)


class _ResponseDecoder:
    """Response tokens to the text that is scored; the tokenizer is loaded when first needed."""

    def __init__(self, model_path: str) -> None:
        self._model_path = model_path
        self._tokenizer: Any = None

    def text(self, response_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            from megatron_async.tasks.text_task import load_tokenizer

            self._tokenizer = load_tokenizer(self._model_path)
        return str(self._tokenizer.decode(list(response_ids), skip_special_tokens=True))
