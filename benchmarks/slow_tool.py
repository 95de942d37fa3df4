"""An environment whose every reply takes its time (`simulated_episode.py`)."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_async.environments import Answer, Step


class SlowTool:
    """Ends after so many turns, each of which takes so many seconds."""

    def __init__(self, turns: int, seconds: float) -> None:
        self._turns, self._seconds = turns, seconds

    def reset(self, seed: int, **row: Any) -> str:
        return f"task {seed}"

    async def step(self, answer: Answer) -> Step:
        await asyncio.sleep(self._seconds)
        return Step("result", done=answer.turn + 1 == self._turns)
