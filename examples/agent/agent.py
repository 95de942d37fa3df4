"""An agent: a program that plays a guessing game with the policy and returns the reward."""

import random

from openai import AsyncOpenAI


async def solve(base_url: str, api_key: str, seed: int, high: int = 100, **row) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    number = random.Random(seed).randint(1, high)
    messages = [{"role": "user", "content": f"Guess my number, 1 to {high}."}]
    for _ in range(7):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        if not text.strip().isdecimal():
            hint = "Only a number."
        elif int(text) == number:
            return 1.0
        else:
            hint = "higher" if int(text) < number else "lower"
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": hint}]
    return 0.0
