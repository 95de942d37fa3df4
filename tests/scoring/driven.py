"""Provides a blocking scorer worker for tests that are not asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_async.config.reward import ScorerSettings
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.jobs import ScoreJob
from megatron_async.scoring.workers import ScorerWorker


class DrivenWorker:
    """Scorer worker with blocking methods: each call runs the worker's event loop to the reply."""

    def __init__(self, settings: ScorerSettings) -> None:
        self._runner = asyncio.Runner()
        self.worker = ScorerWorker(settings)

    @property
    def restarts(self) -> int:
        return self.worker.restarts

    def start(self) -> list[bool]:
        return self._runner.run(self.worker.start())

    def score(self, work: Sequence[ScoreJob]) -> list[list[ResponseScore]]:
        return self._runner.run(self.worker.score(work))

    def pid(self) -> int | None:
        return self.worker.pid()

    def close(self) -> None:
        self.worker.close()
        self._runner.close()
