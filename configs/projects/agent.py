"""An agent: a program that calls the policy for a row of data.jsonl and returns the reward."""

from openai import AsyncOpenAI


async def solve(base_url: str, api_key: str, prompt: str, answer: str, **row) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages = [{"role": "user", "content": prompt}]
    for attempt in (1, 2):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        if text.rpartition("#")[2].strip() == answer:
            return 1.0 / attempt
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "Wrong. Try again."},
        ]
    return 0.0
