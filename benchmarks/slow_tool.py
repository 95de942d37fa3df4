"""An environment whose replies take a fixed time, for `simulated_episode.py`."""

from __future__ import annotations

import asyncio
from typing import Any

from megatron_async.environments import Answer, Step


class SlowTool:
    """Environment that ends after `turns` turns and takes `seconds` seconds for each reply."""

    def __init__(self, turns: int, seconds: float) -> None:
        self._turns, self._seconds = turns, seconds

    def reset(self, seed: int, **row: Any) -> str:
        return f"task {seed}"

    async def step(self, answer: Answer) -> Step:
        await asyncio.sleep(self._seconds)
        return Step("result", done=answer.turn + 1 == self._turns)
