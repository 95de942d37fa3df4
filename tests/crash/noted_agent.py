"""An agent that writes down every answer that it gets before it does anything else.

Its file is the witness of what a program has seen, in the form of `noted_environment.py`. After a
kill it runs again, so that an answer which it has had comes again. An episode's name is its seed
and its number, by the ids of its answers; what is played before a start has the number "trial".
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
    """One conversation, of a number of calls that follows from the seed."""
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
