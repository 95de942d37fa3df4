"""Tests the rewards `http` and `judge` against a service in this process.

The tests check what the rewards send, read, retry and count.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from megatron_async.config import build_config
from megatron_async.errors import UserError
from megatron_async.scoring.rewards import services
from megatron_async.scoring.rewards.reward import build_reward
from megatron_async.scoring.rewards.sample import RewardScore, Sample, Unavailable

SAMPLE = Sample("It is 4.", "2+2?", "4", {"level": 1})
Reply = Callable[[dict[str, Any]], Any]
"""Returns the service's reply to a request with this body."""


class Request(NamedTuple):
    """A request that the service received."""

    path: str
    authorization: str
    body: dict[str, Any]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the rewards retry without a pause."""
    monkeypatch.setattr(services, "_FIRST_PAUSE_SECONDS", 0.0)


def served(
    handler: Callable[[web.Request], Awaitable[web.Response]],
    where: str | Callable[[str], str],
    name: str = "http",
    **arguments: Any,
) -> RewardScore:
    """Start a service with this handler; return the score that a reward gives `SAMPLE` by it.

    Args:
        handler: Replies to every request.
        where: Path of the reward's `url` on the service, or a function that returns the whole `url`
            for the service's address.
        name: Name of the reward.
        arguments: Arguments of the reward.
    """

    async def score() -> RewardScore:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        own = f"http://127.0.0.1:{runner.addresses[0][1]}"
        url = f"{own}{where}" if isinstance(where, str) else where(own)
        reward = {"name": name, "arguments": {"url": url, "retries": 0, **arguments}}
        settings = build_config({"reward": reward}).scorers
        try:
            (found,) = await build_reward(settings, settings.parts[0]).score_async([SAMPLE])
            return found
        finally:
            await runner.cleanup()

    return asyncio.run(score())


def ask(name: str, replies: list[Reply], **arguments: Any) -> tuple[RewardScore, list[Request]]:
    """Score `SAMPLE` by a service whose n-th reply is `replies[n]`; return score and requests."""
    requests: list[Request] = []

    async def reply(request: web.Request) -> web.Response:
        body = await request.json()
        requests.append(Request(request.path, request.headers.get("Authorization", ""), body))
        found = replies[len(requests) - 1](body)
        return found if isinstance(found, web.Response) else web.json_response(found)

    arguments = {"retries": 3, **arguments}
    return served(reply, "/v1", name, **arguments), requests


def test_services_close_connections_when_event_loop_ends(caplog: pytest.LogCaptureFixture) -> None:
    ask("http", [lambda _: 1.0])
    gc.collect()
    assert "Unclosed" not in caplog.text


def completion(text: str) -> dict[str, Any]:
    """Return a reply with this text in the form of an OpenAI-compatible endpoint."""
    return {
        "object": "chat.completion",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }


def busy(_: Any) -> web.Response:
    """Reply that the service is busy."""
    return web.Response(status=429, headers={"Retry-After": "0"}, text="slow down")


HUGE = b'"' + b"x" * (4 << 20) + b'"'


def huge(_: Any) -> web.Response:
    """Reply with more than 4 MiB, which take only a few kilobytes compressed."""
    reply = web.Response(body=HUGE)
    reply.enable_compression()
    return reply


def test_http_reads_whole_reply_when_within_size_limit() -> None:
    padded = {"score": 0.5, "note": 1.0, **{f"part{i}": 0.0 for i in range(20_000)}}
    score, _ = ask("http", [lambda _: padded])
    assert (score.value, len(score.parts)) == (0.5, 20_001)


def test_http_sends_row_and_accepts_number_or_named_components(
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


def test_http_sends_filled_template_when_format_is_sglang() -> None:
    reply = [{"embedding": [-1.5], "meta_info": {"id": "x", "prompt_tokens": 9}}]
    score, (request,) = ask(
        "http", [lambda _: reply], format="sglang", template="U: {prompt} A: {response}"
    )
    assert score.value == -1.5
    assert request.path == "/v1/classify"
    assert request.body == {"text": ["U: 2+2? A: It is 4."]}


def test_judge_sends_rubric_and_counts_last_stated_score() -> None:
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


@pytest.mark.parametrize(
    ("reply", "marks"),
    [
        ("It is good.\nScore: 8", 8.0),
        ("Score: 8.", 8.0),
        ("score: 8/10", 8.0),
        ("**Score:** 8.5", 8.5),
        ("## Final score: **7**\nThat is all.", 7.0),
        ("Final score (0-10): 7", 7.0),
        ("Score: 8 out of 10", 8.0),
        ("Score: .5", 0.5),
        ("Score: 0", 0.0),
        ("Score: 2\nNo, better:\nScore: 3", 3.0),
        ("<think>Score: 2</think>\nScore: 3", 3.0),
        ("Score: 2\n</think>\nScore: 3", 3.0),
        ("Score: 3\n<think>Score: 2", 3.0),
        ("<think>Maybe the score: 2, or", None),
        ("<think>\nScore: 2\n", None),
        ("Score: -3", None),
        ("Score: 85", None),
        ("Score: 4/5", None),
        ("Score: 80%", None),
        ("Score: 7-8", None),
        ("Score: 7,5", None),
        ("Score: N", None),
        ("Score: 3\nScore: 30", None),
        ("Underscore 5 is a name.", None),
        ("Its underscore: 5", None),
        ("A score: 5 would be too much.", None),
        ("8", None),
    ],
)
def test_marks_in_returns_marks_of_last_score_line(reply: str, marks: float | None) -> None:
    assert services.marks_in(reply, 10.0) == marks


def test_judge_gives_no_score_when_reply_was_cut_off() -> None:
    reply = completion("Score: 1")
    reply["choices"][0]["finish_reason"] = "length"
    with pytest.raises(ValueError, match=r"cut off at max_tokens 512\. Increase that argument"):
        ask("judge", [lambda _: reply], model="m", rubric="r")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h/v1", "http://h/v1/p"),
        ("http://h/v1/", "http://h/v1/p"),
        ("http://h?a=b", "http://h/p?a=b"),
        ("http://h/v1/?a=b/c", "http://h/v1/p?a=b/c"),
    ],
)
def test_below_keeps_query_of_service_address(url: str, address: str) -> None:
    assert services.below(url, "p") == address


@pytest.mark.parametrize("tail", ["score/", "score", "a%2Fb/?x=%7E", "?sig=a%2Bb%3D%3D", "a//b"])
def test_http_requests_exactly_the_given_address(tail: str) -> None:
    targets = []

    async def score(request: web.Request) -> web.Response:
        targets.append(request.raw_path)
        return web.json_response(1.0)

    assert served(score, f"/{tail}").value == 1.0
    assert targets == [f"/{tail}"]


@pytest.mark.parametrize("status", [301, 302, 303])
@pytest.mark.parametrize("name", ["http", "judge"])
def test_services_fail_with_both_addresses_when_redirect_drops_body(name: str, status: int) -> None:
    async def moved(request: web.Request) -> web.Response:
        assert request.path.startswith("/here"), "the redirect is not followed"
        return web.Response(status=status, headers={"Location": "/there"})

    arguments = {"model": "m", "rubric": "r"} if name == "judge" else {}
    with pytest.raises(
        Unavailable, match=r"http://127[^ ]*/here[^ ]* redirects to http://127.*/there"
    ):
        served(moved, "/here", name, **arguments)


@pytest.mark.parametrize("status", [307, 308])
def test_http_follows_redirect_when_body_is_kept(status: int) -> None:
    async def moved(request: web.Request) -> web.Response:
        if request.path == "/there":
            return web.json_response(float((await request.json())["response"] == SAMPLE.response))
        return web.Response(status=status, headers={"Location": "/there"})

    assert served(moved, "/here").value == 1.0


@pytest.mark.parametrize("status", [300, 301, 304])
def test_http_is_unavailable_when_status_is_not_success(status: int) -> None:
    async def odd(request: web.Request) -> web.Response:
        return web.Response(status=status, text="" if status == 304 else "1.0")

    with pytest.raises(Unavailable, match=f"status {status}"):
        served(odd, "/score")


@pytest.mark.parametrize(
    ("url", "variables", "proxy"),
    [
        ("http://grader/v1", {}, None),
        ("http://grader/v1", {"http_proxy": "http://p:3128"}, "http://p:3128"),
        ("http://grader/v1", {"HTTP_PROXY": "p:3128"}, "http://p:3128"),
        ("https://grader/v1", {"http_proxy": "http://p:3128"}, None),
        ("https://grader/v1", {"HTTPS_PROXY": "http://p:1"}, "http://p:1"),
        ("https://grader/v1", {"all_proxy": "http://p:1"}, "http://p:1"),
        ("http://grader/v1", {"http_proxy": "http://p", "no_proxy": "grader"}, None),
        ("http://a.grader:80/", {"http_proxy": "http://p", "NO_PROXY": ".grader"}, None),
        ("http://grader:81/", {"http_proxy": "http://p", "no_proxy": "grader:82"}, "http://p"),
        ("http://127.0.0.1:80/", {"http_proxy": "http://p"}, None),
        ("http://127.1.2.3/", {"http_proxy": "http://p"}, None),
        ("http://localhost/", {"all_proxy": "http://p"}, None),
        ("http://0.0.0.0:9/", {"all_proxy": "http://p"}, None),
        ("http://[::ffff:127.0.0.1]/", {"all_proxy": "http://p"}, None),
        ("http://10.1.2.3/", {"http_proxy": "http://p", "no_proxy": "a, 10.0.0.0/8"}, None),
        ("http://11.1.2.3/", {"http_proxy": "http://p", "no_proxy": "10.0.0.0/8"}, "http://p"),
        ("http://grader/", {"http_proxy": "HTTP://p"}, "HTTP://p"),
        ("http://[::1]:80/", {"http_proxy": "http://p"}, None),
        ("http://127.grader.com/", {"http_proxy": "http://p"}, "http://p"),
    ],
)
def test_proxy_of_follows_environment_except_for_this_machine(
    monkeypatch: pytest.MonkeyPatch, url: str, variables: dict[str, str], proxy: str | None
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert services.proxy_of(url) == proxy


def test_http_uses_proxy_when_environment_names_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def proxy(request: web.Request) -> web.Response:
        proxied = str(request.url) == "http://grader.invalid/score"
        return web.json_response(float(proxied and (await request.json())["prompt"] == "2+2?"))

    def through(address: str) -> str:
        monkeypatch.setenv("http_proxy", address)
        return "http://grader.invalid/score"

    assert served(proxy, through).value == 1.0


def test_http_is_refused_when_proxy_is_not_http(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "socks5://p:1080")
    settings = build_config({"reward": {"name": "http", "arguments": {"url": "http://x"}}}).scorers
    with pytest.raises(UserError, match="names the proxy socks5://p:1080 for http://x; only HTTP"):
        build_reward(settings, settings.parts[0])


def test_judge_retries_and_counts_tokens_of_every_reply_when_service_is_busy() -> None:
    replies: list[Reply] = [busy, lambda _: web.Response(status=503)]
    replies += [lambda _: completion("no idea"), lambda _: completion("Score: 5")]
    score, requests = ask("judge", replies, model="m", rubric="r", temperature=0.7)
    assert (score.value, len(requests), score.parts["tokens_out"]) == (0.5, 4, 20.0)


@pytest.mark.parametrize(
    ("replies", "error", "message", "requests"),
    [
        ([busy] * 3, Unavailable, "status 429: slow down", 3),
        ([lambda _: web.Response(status=401, text="no key")], Unavailable, "401: no key", 1),
        ([lambda _: web.Response(text="<html>")], Unavailable, "not JSON", 1),
        ([lambda _: web.Response(body=b"\xff")], Unavailable, "not JSON", 1),
        ([lambda _: web.Response(text="[" * 90_000)], Unavailable, "not JSON", 1),
        ([huge], Unavailable, "the reply has more than 4 MiB", 1),
        ([lambda _: web.Response(status=400, body=HUGE)], Unavailable, "more than 4 MiB", 1),
        (
            [lambda _: completion("fine!")],
            ValueError,
            "no last line .Score: N. .*ends with 'fine!'",
            1,
        ),
        ([lambda _: {"error": "x"}], ValueError, "which is not a chat completion", 1),
    ],
)
def test_judge_error_names_cause_when_service_fails(
    replies: list[Reply], error: type[Exception], message: str, requests: int
) -> None:
    with pytest.raises(error, match=message):
        ask("judge", replies, model="m", rubric="r", retries=2)


def test_http_is_unavailable_when_no_service_listens() -> None:
    settings = build_config(
        {"reward": {"name": "http", "arguments": {"url": "http://127.0.0.1:9", "retries": 0}}}
    ).scorers
    with pytest.raises(Unavailable, match="ClientConnectorError"):
        asyncio.run(build_reward(settings, settings.parts[0]).score_async([SAMPLE]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": "localhost:80"}, "it must begin with http:// or https://"),
        ({"url": "http://x", "api_key_env": "NO_SUCH_KEY"}, "there is no such environment"),
        ({"url": "http://x", "retrys": 1}, "unknown setting retrys"),
    ],
)
def test_http_is_refused_when_arguments_are_bad(arguments: dict[str, Any], message: str) -> None:
    settings = build_config({"reward": {"name": "http", "arguments": arguments}}).scorers
    with pytest.raises(UserError, match=message):
        build_reward(settings, settings.parts[0])
