"""Provides agents for tests, named by their behavior; the programs do not import this project."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from openai import AsyncOpenAI, BadRequestError, OpenAI

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


def client(base_url: str, api_key: str, **options: Any) -> AsyncOpenAI:
    # The SDK's default of 5 s to connect is too short on a busy machine.
    patient = {"timeout": 300.0, **options}
    return AsyncOpenAI(base_url=base_url, api_key=api_key, **patient)


def user(text: str) -> Any:
    return {"role": "user", "content": text}


async def solve(base_url: str, api_key: str, prompt: str, answer: str, **row: Any) -> float:
    """Guess the answer in up to three turns, as the program in docs/agents.md does."""
    policy = client(base_url, api_key)
    messages: list[Any] = [user(prompt)]
    for _ in range(3):
        reply = await policy.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        if text.strip() == answer:
            return 1.0
        messages += [{"role": "assistant", "content": text}, user("No. Try again.")]
    return 0.0


def solve_in_a_thread(base_url: str, api_key: str, prompt: str, turns: int = 2) -> Any:
    policy = OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [user(prompt)]
    for _ in range(turns):
        reply = policy.chat.completions.create(model="policy", messages=messages)
        messages += [{"role": "assistant", "content": reply.choices[0].message.content}, user("?")]
    return 0.5, {"turns": turns}


async def streams(base_url: str, api_key: str, prompt: str, **row: Any) -> None:
    async with client(base_url, api_key) as policy:
        text = ""
        async for chunk in await policy.chat.completions.create(
            model="policy", messages=[user(prompt)], stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        whole = await policy.chat.completions.create(
            model="policy",
            messages=[user(prompt), {"role": "assistant", "content": text}, user("and")],
            logprobs=True,
        )
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None and logprobs.content is not None
        assert "".join(t.token for t in logprobs.content) == whole.choices[0].message.content


async def parallel(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    policy = client(base_url, api_key)
    calls = [
        policy.chat.completions.create(model="policy", messages=[user(f"{prompt}{i // 2}")])
        for i in range(6)
    ]
    replies = await asyncio.gather(*calls)
    return float(len({reply.id for reply in replies}))


async def impatient(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    """Use a client that times out twice before the policy responds, and retries each time."""
    policy = client(base_url, api_key, timeout=0.3, max_retries=2)
    reply = await policy.chat.completions.create(model="policy", messages=[user(prompt)])
    again = await policy.chat.completions.create(
        model="policy",
        messages=[user(prompt), {"role": "assistant", "content": reply.choices[0].message.content}],
    )
    return float(reply.id != again.id)


async def breaks_off(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    """Read one event of a stream, and continue the conversation with part of its text."""
    policy = client(base_url, api_key)
    stream = await policy.chat.completions.create(
        model="policy", messages=[user(prompt)], stream=True
    )
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        if text:
            break
    await stream.close()
    messages: list[Any] = [user(prompt), {"role": "assistant", "content": text[:1]}, user("on")]
    await policy.chat.completions.create(model="policy", messages=messages)
    return 1.0


async def uses_tools(
    base_url: str, api_key: str, prompt: str, parallel: bool = True, **row: Any
) -> float:
    policy = client(base_url, api_key)
    messages: list[Any] = [user(prompt)]
    made = 0
    while True:
        reply = await policy.chat.completions.create(
            model="policy",
            messages=messages,
            tools=[ADD],  # type: ignore[list-item]
            parallel_tool_calls=parallel,
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return float(made)
        for call in message.tool_calls:
            found = json.loads(call.function.arguments)  # type: ignore[union-attr]
            made += 1
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": str(found["a"] + 1)}
            )


async def asks_for_text(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    """Make a call, then a call with `tool_choice: none` that requests log-probs."""
    policy = client(base_url, api_key)
    reply = await policy.chat.completions.create(model="policy", messages=[user(prompt)])
    answered = {"role": "assistant", "content": reply.choices[0].message.content}
    messages: list[Any] = [user(prompt), answered, user("and")]
    last = await policy.chat.completions.create(
        model="policy",
        messages=messages,
        tools=[ADD],  # type: ignore[list-item]
        tool_choice="none",
        logprobs=True,
    )
    assert not last.choices[0].message.tool_calls
    assert last.choices[0].logprobs is not None
    return float(len(last.choices[0].message.content or ""))


async def talks_on(
    base_url: str, api_key: str, prompt: str, log: str = "", calls: int = 4, **row: Any
) -> float:
    """Extend one conversation by `calls` calls, and write every response to the file `log`."""
    policy = client(base_url, api_key)
    messages: list[Any] = [user(prompt)]
    for _ in range(calls):
        reply = await policy.chat.completions.create(model="policy", messages=messages)
        text = reply.choices[0].message.content or ""
        if log:
            with Path(log).open("a") as file:
                file.write(json.dumps([prompt, len(messages), text]) + "\n")
        messages += [{"role": "assistant", "content": text}, user("on")]
    return 1.0


async def rewrites(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    """Send every response back in upper case."""
    policy = client(base_url, api_key)
    messages: list[Any] = [user(prompt)]
    for _ in range(4):
        reply = await policy.chat.completions.create(model="policy", messages=messages)
        text = (reply.choices[0].message.content or "").upper()
        messages += [{"role": "assistant", "content": text}, user("on")]
    return 1.0


async def drifts(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    """Send different messages in every execution, from the second call on."""
    policy = client(base_url, api_key)
    reply = await policy.chat.completions.create(model="policy", messages=[user(prompt)])
    text = reply.choices[0].message.content or ""
    for _ in range(2):
        messages: list[Any] = [
            user(prompt),
            {"role": "assistant", "content": text},
            user(str(time.monotonic_ns())),
        ]
        await policy.chat.completions.create(model="policy", messages=messages)
    return 1.0


async def wanders_over(
    base_url: str, api_key: str, prompt: str, system: bool = True, tools: bool = False, **row: Any
) -> float:
    """Play random conversations that every chat template can render; the prompt is the seed.

    Roles alternate, and each tool call gets a result. The program edits and compacts its messages,
    starts sub-agents, makes equal and concurrent calls, and sends observations of all lengths.
    """
    chance, policy = random.Random(prompt), client(base_url, api_key, timeout=20, max_retries=4)
    texts = ("go on", "", "x y " * 40, "\N{SNOWMAN} \n\n", "a<|im_end|>b", "<end_of_turn>")
    offered: dict[str, Any] = {"tools": [ADD]} if tools else {}
    thread: list[Any] = [user(prompt)]

    async def ask(messages: list[Any]) -> list[Any]:
        """Return the messages, the policy's response to them, and results of its tool calls."""
        reply = await policy.chat.completions.create(model="policy", messages=messages, **offered)
        message = reply.choices[0].message
        extended = [*messages, message.model_dump(exclude_none=True)]
        for call in message.tool_calls or ():
            content = chance.choice(texts)
            extended.append({"role": "tool", "tool_call_id": call.id, "content": content})
        return extended

    for asked in range(8):
        match chance.randrange(6):
            case 0:  # A sub-agent starts a conversation.
                instructions = [{"role": "system", "content": "sub"}] if system else []
                thread = [*instructions, user(f"{prompt}{asked}")]
            case 1:  # Compaction: earlier messages are removed.
                thread = thread[-1:] if thread[-1]["role"] == "user" else thread
            case 2:  # The last message is edited.
                if thread[-1]["role"] == "user":
                    thread[-1] = user(f"edited {asked}")
            case 3:  # Two equal calls and a different one are made concurrently.
                other = [*thread[:-1], {**thread[-1], "content": "beside it"}]
                answered, *_ = await asyncio.gather(ask(thread), ask(thread), ask(other))
                thread = answered
            case _:
                thread = await ask(thread)
        if thread[-1]["role"] == "assistant":
            thread = [*thread, user(chance.choice(texts))]
    await ask(thread)
    return 1.0


async def cool(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    policy = client(base_url, api_key)
    await policy.chat.completions.create(model="m", messages=[user(prompt)], temperature=0.1)
    return 1.0


async def calls_nobody(base_url: str, api_key: str, **row: Any) -> float:
    return 1.0


async def raises(base_url: str, api_key: str, **row: Any) -> float:
    raise ValueError(f"no good with {api_key}")


async def asks_for_two(base_url: str, api_key: str, **row: Any) -> float:
    client = AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": "x"}], n=2
    )
    return 1.0


async def wants_more(base_url: str, api_key: str, level: int, **row: Any) -> float:
    return 1.0


async def sleeps(base_url: str, api_key: str, **row: Any) -> float:
    await asyncio.sleep(3600)
    return 1.0


async def quits(base_url: str, api_key: str, **row: Any) -> float:
    sys.exit(3)


async def runs_dry(base_url: str, api_key: str, **row: Any) -> float:
    return float(next(iter(())))


def runs_dry_in_a_thread(base_url: str, api_key: str, **row: Any) -> float:
    return float(next(iter(())))


async def cancels_itself(base_url: str, api_key: str, **row: Any) -> float:
    raise asyncio.CancelledError


async def returns_its_key(base_url: str, api_key: str, prompt: str, **row: Any) -> Any:
    await solve(base_url, api_key, prompt, "")
    return api_key


async def sends(
    base_url: str, api_key: str, prompt: str, bodies: list[str], **row: Any
) -> tuple[float, dict[str, int]]:
    """Send `bodies` as requests, and return the HTTP status of each reply as a named number."""
    found = {}
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    async with aiohttp.ClientSession(headers=headers) as session:
        for number, body in enumerate(bodies):
            url = f"{base_url}/chat/completions"
            async with session.post(url, data=body.encode()) as reply:
                found[f"status_{number}"] = reply.status
                assert reply.status == 200 or (await reply.json())["error"]["message"]
    return 1.0, found


async def asks_for_ever(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    policy = client(base_url, api_key)
    while True:
        with suppress(BadRequestError):
            await policy.chat.completions.create(model="policy", messages=[user(prompt)])


async def shortens(base_url: str, api_key: str, prompt: str, words: int = 400, **row: Any) -> float:
    """Halve the only message until the engine accepts its length."""
    policy = client(base_url, api_key)
    while True:
        try:
            text = f"{prompt} {'x ' * words}"
            await policy.chat.completions.create(model="policy", messages=[user(text)])
            return float(words)
        except BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
            words //= 2


async def echoes(base_url: str, api_key: str, prompt: str, **row: Any) -> float:
    """Send responses back in the SDK's forms: with all its fields, and with texts as lists."""
    policy = client(base_url, api_key)
    messages: list[Any] = [{**user(""), "content": [{"type": "text", "text": prompt}]}]
    for form in ("object", "dump", "parts"):
        reply = await policy.chat.completions.create(model="policy", messages=messages)
        message: Any = reply.choices[0].message
        if form != "object":
            message = message.model_dump()
        if form == "parts":
            message["content"] = [{"type": "text", "text": message["content"]}]
        messages += [message, user("on")]
    await policy.chat.completions.create(model="policy", messages=messages)
    return 1.0


async def returns_nothing(base_url: str, api_key: str, prompt: str, **row: Any) -> None:
    policy = client(base_url, api_key)
    await policy.chat.completions.create(model="policy", messages=[user(prompt)])


if __name__ == "__main__":  # As a command; the SDK reads the address and key from the environment.
    row = json.loads(sys.stdin.readline())
    policy = OpenAI()
    for _ in range(2):
        policy.chat.completions.create(model="policy", messages=[user(row["prompt"])])
    print("done")
    print(json.dumps([0.25, {"asked": 2}]))
