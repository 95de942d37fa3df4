"""Provides the scorers of runs in one process: the product's processes, or a plain function."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from megatron_async.config import RunConfig
from megatron_async.config.reward import RewardConfig, ScorerSettings
from megatron_async.scoring.autoscale import ScorerCount
from megatron_async.scoring.interface import Score
from megatron_async.scoring.jobs import ScoreJob
from megatron_async.scoring.workers import ScorerWorker
from megatron_async.trajectory.types import Prompt
from tests.crash.hostile_reward import COMMAND_VARIABLE, IMPORT_PATH, reward_of

_SCORERS = 2


def text_of(response_ids: Iterable[int]) -> str:
    """Return the text that is scored: the token IDs, separated by spaces."""
    return " ".join(map(str, response_ids))


class PlainScorer:
    """Scorer without processes, for runs in which no scorer fails."""

    size = ScorerCount(1)
    failures: Mapping[str, str] = MappingProxyType({})

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        await asyncio.sleep(0)
        return reward_of(text_of(response_ids)), {}

    def close(self) -> None:
        """Do nothing, because there is no process to end."""


class ScorerProcesses:
    """The product's scorer processes, with a scorer that fails when `command` asks for it."""

    size = ScorerCount(_SCORERS)
    failures: Mapping[str, str] = MappingProxyType({})

    def __init__(self, config: RunConfig, command: Path) -> None:
        os.environ[COMMAND_VARIABLE] = str(command)
        reward = RewardConfig.model_validate({"name": IMPORT_PATH})
        scoring = ScorerSettings(task=config.task, rewards=[reward])
        self._workers = [ScorerWorker(scoring) for _ in range(_SCORERS)]
        self._idle: asyncio.Queue[int] = asyncio.Queue()
        for place in range(_SCORERS):
            self._idle.put_nowait(place)

    async def score(self, prompt: Prompt, response_ids: Sequence[int]) -> Score:
        place = await self._idle.get()  # Every score has a time limit, so this wait is bounded.
        work = [ScoreJob(0, prompt.payload, (text_of(response_ids),))]
        # A separate task continues after its caller was canceled; only then is the worker idle.
        scoring = asyncio.ensure_future(self._workers[place].score(work))
        scoring.add_done_callback(lambda _: self._idle.put_nowait(place))
        [[scored]] = await asyncio.shield(scoring)  # Bounded by the time limit of a score.
        return scored.reward, scored.detail

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
