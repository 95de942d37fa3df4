"""Provides an agent that writes every response it receives to disk before it continues.

Its file has the format of `noted_environment.py` and is the record of what the agent's program
received. After a kill the program runs again, so that it receives earlier responses again. The name
of an episode consists of its seed and its number, which is part of the IDs of its responses. The
trial episode before a run has the number "trial".
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from openai import AsyncOpenAI

from tests.crash.noted_environment import note

_TOOL_SECONDS = 0.02
_CALLS = (3, 8)


async def play(base_url: str, api_key: str, seed: int, ledger: str, **row: Any) -> float:
    """Play one conversation and return its reward; the seed determines the number of calls.

    Args:
        base_url: Address of the gateway to the policy.
        api_key: Key of the episode.
        seed: Seed of the episode.
        ledger: File to which the responses are written.
        row: Further columns of the task's row, which are ignored.
    """
    messages: list[Any] = [{"role": "user", "content": f"seed {seed}"}]
    reward = 0.0
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(random.Random(seed).randint(*_CALLS)):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            text = reply.choices[0].message.content or ""
            _, number, turn = reply.id.split("-")
            note(ledger, what="step", name=f"{seed}-{number}", seed=seed, turn=int(turn), text=text)
            await asyncio.sleep(_TOOL_SECONDS)
            reward += len(text) % 3 / 4
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": f"{turn} done"},
            ]
    return reward
