"""An agent: a program that knows the OpenAI package, and nothing of megatron_async.

Three tries at a product; an answer is right when it ends with the number.
"""

from openai import AsyncOpenAI


async def solve(base_url: str, api_key: str, prompt: str, answer: str, **row: object) -> float:
    """The reward of one row: what is left of 1 after each try that was wrong."""
    client = AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list = [{"role": "user", "content": prompt}]
    for reward in (1.0, 0.5, 0.25):
        reply = await client.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        if text.strip().endswith(answer):
            return reward
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": "No. Try again."},
        ]
    return 0.0
