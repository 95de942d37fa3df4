"""Agents that ask oddly: calls, conversations and ends that no careful program has."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from megatron_async.environments.agents import AgentWorker
from megatron_async.environments.calls import AgentCalls
from megatron_async.environments.chat import ChatAnswer, ChatCall
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.trajectory.types import FinishReason, Turn
from tests.environments.templates import template_of
from tests.environments.test_agents import (
    PAYLOAD,
    Played,
    go_on,
    load_tokenizer_once,
    model,
    play,
    run,
    worker_of,
)

__all__ = ["model"]

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}


def nested(levels: int) -> str:
    return '{"a": ' * levels + "{}" + "}" * levels


def tool(**parts: Any) -> str:
    function = {"name": "add", **parts}
    return json.dumps({**HELLO, "tools": [{"type": "function", "function": function}]})


def calling(arguments: str) -> str:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    return json.dumps({"messages": [*HELLO["messages"], answer]})


BODIES = {
    "half of a surrogate pair": (r'{"messages": [{"role": "user", "content": "a \ud800 b"}]}', 200),
    "one in arguments": (calling(r'{"a": "\udfff"}'), 200),
    "arguments that Python cannot read": (calling("[" * 100_000), 400),
    "arguments that it cannot write": (calling(nested(300)), 400),
    "deep arguments": (calling(nested(60)), 200),
    "a deep tool": (tool(parameters="-").replace('"-"', nested(300)), 400),
    "a tool without parameters": (tool(parameters=None), 200),
    "a name in another script": (tool(description="\N{SNOWMAN}"), 200),
    "a description that is none": (tool(description=5), 400),
    "a tool that is strict perhaps": (tool(strict="perhaps"), 400),
}


@pytest.mark.parametrize("what", BODIES)
def test_an_odd_call_is_a_turn_or_refused_and_the_episode_goes_on(model: str, what: str) -> None:
    sent, status = BODIES[what]

    async def body() -> None:
        arguments = {"bodies": [sent, json.dumps(HELLO)]}
        worker = worker_of(model, "sends", tool_parser="qwen25", arguments=arguments)
        load_tokenizer_once(worker).chat_template = template_of("qwen2_5")
        worker._texts._known.clear()
        played = await play(worker, lambda turn: "yes")
        assert played.ended is not None and played.ended.ended == "stop"
        assert played.ended.answer["parts"] == {"status_0": status, "status_1": 200}
        assert len(played.turns) == (2 if status == 200 else 1)

    run(body())


def test_an_answer_sent_back_with_what_the_sdk_adds_is_no_fork(model: str) -> None:
    async def body() -> None:
        played = await play(worker_of(model, "echoes"), lambda turn: "\N{SNOWMAN} \n" * turn)
        assert [turn.parent for turn in played.turns] == [None, 0, 1, 2]
        assert played.counts == {"turns_left": 0}

    run(body())


def test_instructions_that_change_with_every_call_are_named(model: str) -> None:
    async def body() -> None:
        played = await play(worker_of(model, "reads_the_clock"), str)
        assert played.counts["forks_message"] == 3
        (notice,) = played.notices
        assert "the first that differs is message 0" in notice and "now " in notice
        other = await play(worker_of(model, "parallel"), str)
        assert other.counts["forks_thread"] == 2 and other.notices == []

    run(body())


def test_a_program_that_only_repeats_what_is_refused_is_ended_as_length(model: str) -> None:
    async def body() -> None:
        worker = worker_of(model, "asks_for_ever", max_turns=2, step_seconds=2.0)
        played = await play(worker, str, most=2)
        assert played.ended is not None
        assert (played.ended.ended, played.ended.reward) == ("length", 0.0)
        assert len(played.turns) == 2

    run(body())


def test_a_first_call_that_is_too_long_may_be_shortened(model: str) -> None:
    async def body() -> None:
        worker = worker_of(model, "shortens")
        opened = await worker.begin("a.5.0", PAYLOAD, 300)
        assert 150 < len(opened.token_ids) <= 300
        played = Played(load_tokenizer_once(worker))
        played.opened(opened, None)
        await go_on(worker, played, str)
        assert played.ended is not None
        assert (played.ended.ended, played.ended.reward) == ("length", 100.0)
        sentence = r"without a call of the policy that can be a turn: .* has 5 tokens; .* takes 4"
        with pytest.raises(EnvironmentFault, match=sentence):
            await worker_of(model, "solve").begin("a.5.0", PAYLOAD, 4)

    run(body())


def test_an_episode_that_is_forgotten_gives_its_thread_back(model: str) -> None:
    async def body() -> None:
        worker = worker_of(model, "solve_in_a_thread", threads=1, step_seconds=25.0)
        for key in ("a.5.0", "b.6.0"):
            await worker.begin(key, PAYLOAD)  # its thread waits for an answer from here on
            await worker.forget(key)

    run(body())


def test_a_key_ends_with_its_episode(model: str) -> None:
    async def body() -> None:
        worker = worker_of(model, "solve")
        played = Played(load_tokenizer_once(worker))
        played.opened(await worker.begin("a.5.0", PAYLOAD), None)
        (key,) = worker._gateway._owners

        async def status() -> int:
            headers = {"Authorization": f"Bearer {key}"}
            async with (
                aiohttp.ClientSession(headers=headers) as session,
                session.get(f"{worker._gateway.url}/models") as reply,
            ):
                return reply.status

        assert await status() == 200
        await go_on(worker, played, lambda turn: "7")
        assert played.ended is not None and played.ended.reward == 1.0
        assert await status() == 401

    run(body())


def test_a_reward_that_is_none_is_named_without_the_key(model: str) -> None:
    async def body() -> None:
        with pytest.raises(EnvironmentFault, match=r"returned '\(key\)'; it must be a number"):
            await play(worker_of(model, "returns_its_key"), str)

    run(body())


def test_calls_pass_by_the_proxy_of_a_site(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.setenv("NO_PROXY", "example.org")

    async def body() -> None:
        played = await play(worker_of(model, "solve"), lambda turn: "7")
        assert played.ended is not None and played.ended.reward == 1.0

    run(body())


def test_a_program_that_asks_nothing_when_it_runs_again_is_a_fault(model: str) -> None:
    async def body() -> None:
        first, second = worker_of(model, "solve"), worker_of(model, "calls_nobody")
        opened = await first.begin("a.5.0", PAYLOAD)
        await first.forget("a.5.0")
        await second.restore("b.5.1", PAYLOAD, [Turn(0, None, 0, opened.messages)])
        with pytest.raises(
            EnvironmentFault, match=r"without a call of the policy whose answer it took$"
        ):
            await second.step("b.5.1", [3, 4], 0, 1 << 30, False, [-0.5, -0.5])
        await second.forget("b.5.1")

    run(body())


@pytest.mark.parametrize("dies", [False, True])
def test_a_call_is_answered_as_it_asked_also_after_a_kill(model: str, dies: bool) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'

    def started() -> AgentWorker:
        worker = worker_of(model, "asks_for_text", tool_parser="qwen25")
        load_tokenizer_once(worker).chat_template = template_of("qwen2_5")
        worker._texts._known.clear()
        return worker

    async def body() -> None:
        worker = started()
        played = Played(load_tokenizer_once(worker))
        played.opened(await worker.begin("a.5.0", PAYLOAD), None)
        await go_on(worker, played, lambda turn: "hm", turns=1)
        if dies:
            worker = started()
            await worker.restore("a.5.0", PAYLOAD, played.turns)
        await go_on(worker, played, lambda turn: call)
        assert played.ended is not None and played.ended.reward == len(call)

    run(body())


def test_an_agent_whose_calls_can_no_longer_be_read_is_a_fault(model: str) -> None:
    """Its run was resumed without the parser."""

    async def body() -> None:
        tools = {"role": "tools", "content": json.dumps([{"function": {"name": "add"}}])}
        answer = {"text": "yes", "truncated": False, "tool_calls": [], "tokens": [5, 3]}
        turns = [
            Turn(0, None, 0, (tools, *HELLO["messages"]), end=FinishReason.STOP, answer=answer),
            Turn(1, 0, 1, HELLO["messages"], state=b"{}"),
        ]
        worker = worker_of(model, "solve")
        with pytest.raises(EnvironmentFault, match=r"episode\.tool_parser is not set"):
            await worker.restore("a.5.0", PAYLOAD, turns)
        await worker.forget("a.5.0")

    run(body())


def test_a_retry_gets_the_answer_that_was_lost_and_an_equal_call_another() -> None:
    async def body() -> None:
        calls, asked = AgentCalls(lambda: False), ChatCall(({"role": "user", "content": "a"},))
        first = calls.call(asked, retry=False)
        first.clients = 1
        assert await calls.next(1) is first
        calls.begin(first, calls.match(first))
        calls.reply(0, ChatAnswer("5-0", "one"))
        first.given, first.clients = True, 0  # it was sent, and its client had just given up
        assert calls.call(asked, retry=True) is first
        assert calls.call(asked, retry=False) is not first

    run(body())


@pytest.mark.parametrize("retry", [True, False])
def test_a_call_that_was_left_in_the_queue_is_asked_again_for_itself(retry: bool) -> None:
    """Of two equal calls at once, one is answered; the other's client comes back later."""

    async def body() -> None:
        calls, asked = AgentCalls(lambda: False), ChatCall(({"role": "user", "content": "a"},))
        first = calls.call(asked, retry=False)
        first.clients = 1
        second = calls.call(asked, retry=False)
        assert await calls.next(1) is first
        calls.begin(first, calls.match(first))
        calls.reply(0, ChatAnswer("5-0", "one"))
        first.given, first.clients = True, 0
        with pytest.raises(TimeoutError):
            await calls.next(0.01)
        again = calls.call(asked, retry=retry)
        assert again is second, "and not the answer that the first has had"
        again.clients = 1
        assert await calls.next(1) is second

    run(body())
