"""`http` and `judge` against a service in this process: what they send, read, retry and count."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from megatron_async.config import build_config
from megatron_async.errors import UserError
from megatron_async.scoring.rewards import services
from megatron_async.scoring.rewards.reward import build_reward
from megatron_async.scoring.rewards.sample import RewardScore, Sample, Unavailable

SAMPLE = Sample("It is 4.", "2+2?", "4", {"level": 1})
Answer = Callable[[dict[str, Any]], Any]


class Asked(NamedTuple):
    path: str
    authorization: str
    body: dict[str, Any]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_FIRST_PAUSE_SECONDS", 0.0)


def ask(name: str, answers: list[Answer], **arguments: Any) -> tuple[RewardScore, list[Asked]]:
    """One score; the service answers the n-th request by `answers[n]`."""
    asked: list[Asked] = []

    async def reply(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(Asked(request.path, request.headers.get("Authorization", ""), body))
        found = answers[len(asked) - 1](body)
        return found if isinstance(found, web.Response) else web.json_response(found)

    async def score() -> RewardScore:
        app = web.Application()
        app.router.add_post("/{path:.*}", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        settings = build_config(
            {
                "reward": {
                    "name": name,
                    "arguments": {"url": f"http://127.0.0.1:{port}/v1", **arguments},
                }
            }
        ).scorers
        try:
            (found,) = await build_reward(settings, settings.parts[0]).score_async([SAMPLE])
            return found
        finally:
            await runner.cleanup()

    return asyncio.run(score()), asked


def test_connections_are_closed_with_the_event_loop(caplog: pytest.LogCaptureFixture) -> None:
    ask("http", [lambda _: 1.0])
    gc.collect()
    assert "Unclosed" not in caplog.text


def completion(text: str) -> dict[str, Any]:
    """As an OpenAI-compatible endpoint replies."""
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


def busy(_: Any) -> web.Response:
    return web.Response(status=429, headers={"Retry-After": "0"}, text="slow down")


HUGE = b'"' + b"x" * (4 << 20) + b'"'


def huge(_: Any) -> web.Response:
    """A few kilobytes on the wire."""
    reply = web.Response(body=HUGE)
    reply.enable_compression()
    return reply


def test_a_reply_within_the_limit_is_read_whole() -> None:
    padded = {"score": 0.5, "note": 1.0, **{f"part{i}": 0.0 for i in range(20_000)}}
    score, _ = ask("http", [lambda _: padded])
    assert (score.value, len(score.parts)) == (0.5, 20_001)


def test_a_service_gets_the_row_and_gives_a_number_or_named_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KEY", "abc")
    score, (request,) = ask("http", [lambda _: 0.5], api_key_env="KEY")
    assert score == RewardScore(0.5, {})
    assert request.authorization == "Bearer abc" and request.body == {
        "prompt": "2+2?",
        "response": "It is 4.",
        "answer": "4",
        "metadata": {"level": 1},
    }
    score, _ = ask("http", [lambda _: {"score": 1, "style": 0.25}])
    assert score == RewardScore(1.0, {"style": 0.25})


def test_a_reward_model_of_sglang_gets_the_filled_template() -> None:
    answer = [{"embedding": [-1.5], "meta_info": {"id": "x", "prompt_tokens": 9}}]
    score, (request,) = ask(
        "http", [lambda _: answer], format="sglang", template="U: {prompt} A: {response}"
    )
    assert score.value == -1.5
    assert request.path == "/v1/classify"
    assert request.body == {"text": ["U: 2+2? A: It is 4."]}


def test_a_grading_model_is_asked_by_its_rubric_and_its_last_score_counts() -> None:
    score, (request,) = ask(
        "judge",
        [lambda _: completion("<think>Score: 1</think>Right, but terse. **Score: 8**")],
        model="m",
        rubric="Is {response} right?",
        price_in=2.0,
        price_out=10.0,
    )
    assert score.value == 0.8
    assert score.parts == {
        "tokens_in": 100.0,
        "tokens_out": 10.0,
        "cost": pytest.approx(100 * 2e-6 + 10 * 10e-6),
    }
    body = request.body
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("m", 0.0, 512)
    text = body["messages"][0]["content"]
    assert text.startswith("Is It is 4. right?")
    assert "<prompt>\n2+2?\n</prompt>" in text and "<answer>\n4\n</answer>" in text
    assert text.endswith('End with a line "Score: N", N from 0 to 10.')


def test_scores_beyond_the_scale_are_cut() -> None:
    score, _ = ask("judge", [lambda _: completion("Score: 99")], model="m", rubric="r")
    assert score.value == 1.0


def test_a_busy_service_is_asked_again_and_every_reply_is_counted() -> None:
    answers: list[Answer] = [busy, lambda _: web.Response(status=503)]
    answers += [lambda _: completion("no idea"), lambda _: completion("Score: 5")]
    score, asked = ask("judge", answers, model="m", rubric="r", temperature=0.7)
    assert (score.value, len(asked), score.parts["tokens_out"]) == (0.5, 4, 20.0)


@pytest.mark.parametrize(
    ("answers", "error", "sentence", "requests"),
    [
        ([busy] * 3, Unavailable, "status 429: slow down", 3),
        ([lambda _: web.Response(status=401, text="no key")], Unavailable, "401: no key", 1),
        ([lambda _: web.Response(text="<html>")], Unavailable, "not JSON", 1),
        ([lambda _: web.Response(body=b"\xff")], Unavailable, "not JSON", 1),
        ([lambda _: web.Response(text="[" * 90_000)], Unavailable, "not JSON", 1),
        ([huge], Unavailable, "its reply has more than 4 MiB", 1),
        ([lambda _: web.Response(status=400, body=HUGE)], Unavailable, "more than 4 MiB", 1),
        ([lambda _: completion("fine!")], ValueError, "gave no score: its reply ends 'fine!'", 1),
        ([lambda _: {"error": "x"}], ValueError, "which is no chat completion", 1),
    ],
)
def test_what_a_service_does_wrong_is_named(
    answers: list[Answer], error: type[Exception], sentence: str, requests: int
) -> None:
    with pytest.raises(error, match=sentence):
        ask("judge", answers, model="m", rubric="r", retries=2)


def test_a_service_that_is_not_there_is_unavailable() -> None:
    settings = build_config(
        {"reward": {"name": "http", "arguments": {"url": "http://127.0.0.1:9", "retries": 0}}}
    ).scorers
    with pytest.raises(Unavailable, match="ClientConnectorError"):
        asyncio.run(build_reward(settings, settings.parts[0]).score_async([SAMPLE]))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"url": "localhost:80"}, "it must begin with http:// or https://"),
        ({"url": "http://x", "api_key_env": "NO_SUCH_KEY"}, "there is no such environment"),
        ({"url": "http://x", "retrys": 1}, "unknown setting retrys"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], sentence: str) -> None:
    settings = build_config({"reward": {"name": "http", "arguments": arguments}}).scorers
    with pytest.raises(UserError, match=sentence):
        build_reward(settings, settings.parts[0])
