"""Tests the gateway's API keys and limits, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

import aiohttp
import pytest
from openai import AsyncOpenAI, NotFoundError
from openai.types import Model

from megatron_async.config.rollout import SamplingConfig
from megatron_async.environments import gateway as gateway_module
from megatron_async.environments.calls import Call
from megatron_async.environments.chat import ChatAnswer, ChatCall
from megatron_async.environments.gateway import MAX_BODY, Gateway

SECONDS = 60
BODY = {"messages": [{"role": "user", "content": "hello"}]}


class RecordingHandler:
    """A call handler that records its calls, and responds at once or, with `waits`, never."""

    def __init__(self, *, waits: bool = False) -> None:
        self.waits = waits
        self.calls: list[Call] = []
        self.retries: list[bool] = []

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        self.retries.append(retry)
        call = Call(asked)
        self.calls.append(call)
        if not self.waits:
            call.answer.set_result(ChatAnswer("1-0", "hi"))
        return call


async def ask(url: str, key: str | None, path: str = "/chat/completions", **more: Any) -> Any:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with aiohttp.ClientSession() as session:
        options = {"json": BODY, "headers": headers, **more}
        async with session.post(url + path, **options) as reply:
            return reply.status, await reply.json()


async def assert_serves(url: str, key: str) -> None:
    assert (await ask(url, key))[0] == 200


async def test_gateway_replies_401_when_the_key_is_missing_unknown_or_revoked() -> None:
    gateway, handler = Gateway(SamplingConfig()), RecordingHandler()
    url, key = await gateway.start(), gateway.open(handler)
    other = Gateway(SamplingConfig()).open(RecordingHandler())
    await assert_serves(url, key)
    assert (await ask(url, None, headers={"x-api-key": key}))[0] == 200
    for wrong in (None, "", "sk-", other, key[:-1], key + "x"):
        status, reply = await ask(url, wrong)
        assert (status, reply["error"]["type"]) == (401, "authentication_error")
        assert key not in json.dumps(reply)
    gateway.end(key)
    assert (await ask(url, key))[0] == 401
    assert len(handler.calls) == 2
    await gateway.close()


async def test_gateway_listens_only_on_the_loopback_address() -> None:
    gateway = Gateway(SamplingConfig())
    await gateway.start()
    assert gateway._server is not None
    (listening,) = gateway._server.sockets
    assert listening.getsockname()[0] == "127.0.0.1"
    await gateway.close()


async def test_gateway_refuses_unknown_paths_and_invalid_bodies_with_a_message() -> None:
    gateway = Gateway(SamplingConfig())
    url, key = await gateway.start(), gateway.open(RecordingHandler())
    status, reply = await ask(url, key, "/embeddings")
    assert status == 404 and "it has POST /v1/chat/completions" in reply["error"]["message"]
    for data in (b"{", b"[" * 100_000, b"\xff", b""):
        status, reply = await ask(url, key, json=None, data=data)
        assert status == 400 and reply["error"]["message"].startswith("the body is")
    await gateway.close()


@pytest.mark.parametrize("announced", [True, False])
async def test_gateway_refuses_a_body_of_100_mb(announced: bool) -> None:
    gateway = Gateway(SamplingConfig())
    url, key = await gateway.start(), gateway.open(RecordingHandler())

    async def parts() -> Any:
        for _ in range(100):
            yield bytes(1 << 20)

    with suppress(aiohttp.ClientConnectionError):
        data = bytes(100 << 20) if announced else parts()
        status, reply = await ask(url, key, json=None, data=data)
        assert status == 413 and f"{MAX_BODY:,}" in reply["error"]["message"]
    await assert_serves(url, key)
    await gateway.close()


async def test_gateway_closes_connections_that_send_no_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_module, "_SHOW_KEY_SECONDS", 0.5)
    monkeypatch.setattr(gateway_module, "_MAX_UNAUTHENTICATED", 50)
    gateway = Gateway(SamplingConfig())
    url, key = await gateway.start(), gateway.open(RecordingHandler())
    port = int(url.rpartition(":")[2].partition("/")[0])
    async with aiohttp.ClientSession() as session:
        headers = {"Authorization": f"Bearer {key}"}

        async def authenticated() -> int:
            """Send a request with the key on the session's connection; return the status."""
            async with session.post(f"{url}/chat/completions", json=BODY, headers=headers) as r:
                return r.status

        assert await authenticated() == 200
        idle = []
        for _ in range(400):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nA: b\r\n")
            idle.append((reader, writer))
        assert await authenticated() == 200
        assert len(gateway._unauthenticated) <= 50
        assert len(gateway._connections) <= 52
        await asyncio.sleep(1.0)
        assert not gateway._unauthenticated
        assert await authenticated() == 200, "a connection that sent a valid key is not closed"
        for reader, writer in idle:
            with suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
    await gateway.close()


@pytest.mark.parametrize("stream", [False, True])
def test_call_is_not_received_when_its_client_disconnected_before_the_reply(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def body() -> None:
        gateway, handler = Gateway(SamplingConfig()), RecordingHandler()
        url = await gateway.start()

        class Disconnecting(RecordingHandler):
            def call(self, asked: ChatCall, *, retry: bool) -> Call:
                for connection in list(gateway._connections):
                    connection.drop()  # The client disconnects just before the response.
                return handler.call(asked, retry=retry)

        key = gateway.open(Disconnecting())
        with pytest.raises(aiohttp.ClientConnectionError):
            await ask(url, key, json={**BODY, "stream": stream})
        while handler.calls[0].clients:
            await asyncio.sleep(0.01)
        assert not handler.calls[0].received
        await gateway.close()

    asyncio.run(asyncio.wait_for(body(), 60))
    assert not caplog.records, "a client that disconnects is not logged"


async def test_gateway_replies_408_when_the_body_does_not_arrive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gateway_module, "_BODY_SECONDS", 0.2)
    gateway, handler = Gateway(SamplingConfig()), RecordingHandler()
    url, key = await gateway.start(), gateway.open(handler)

    async def parts() -> Any:
        yield b"{"
        await asyncio.sleep(30)

    status, reply = await ask(url, key, json=None, data=parts())
    assert status == 408 and "did not arrive within 0.2 s" in reply["error"]["message"]
    assert not handler.calls
    await gateway.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_gateway_reply_is_literal_text_when_the_response_is_not_ascii(stream: bool) -> None:
    class Answering(RecordingHandler):
        def call(self, asked: ChatCall, *, retry: bool) -> Call:
            call = Call(asked)
            call.answer.set_result(ChatAnswer("1-0", "東京 😀 \ud800"))
            return call

    gateway = Gateway(SamplingConfig())
    url, key = await gateway.start(), gateway.open(Answering())
    headers = {"Authorization": f"Bearer {key}"}
    asked = {**BODY, "stream": stream}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/chat/completions", json=asked, headers=headers) as reply,
    ):
        assert "東京 😀 \\ud800" in (await reply.read()).decode()
    await gateway.close()


async def get(url: str, key: str, path: str) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url + path) as reply,
    ):
        return reply.status, await reply.json()


async def test_gateway_describes_the_policy_and_no_other_model() -> None:
    gateway = Gateway(SamplingConfig())
    url, key = await gateway.start(), gateway.open(RecordingHandler())
    status, found = await get(url, key, "/models/policy")
    assert status == 200 and Model.model_validate(found, strict=True).id == "policy"
    assert (await get(url, key, "/models"))[1]["data"] == [found]
    for unknown in ("gpt-4o", "Policy", "org/model", "org%2Fmodel", "policy/"):
        status, refused = await get(url, key, f"/models/{unknown}")
        assert (status, refused["error"]["code"]) == (404, "model_not_found")
        assert refused["error"]["type"] == "invalid_request_error"
    assert (await get(url, "sk-", "/models/policy"))[0] == 401
    client = AsyncOpenAI(base_url=url, api_key=key)
    assert (await client.models.retrieve("policy")).id == "policy"
    with pytest.raises(NotFoundError, match="does not exist"):
        await client.models.retrieve("gpt-4o")
    await client.close()
    await gateway.close()


async def ask_with_expect(
    url: str, key: str, expect: str = "100-continue", version: str = "1.1", length: int = 0
) -> tuple[bytes, bytes]:
    """Send a request's headers, and its body once the gateway sends 100; return both replies."""
    port = int(url.rpartition(":")[2].partition("/")[0])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(BODY).encode()
    writer.write(
        f"POST /v1/chat/completions HTTP/{version}\r\nHost: a\r\nConnection: close\r\n"
        f"Authorization: Bearer {key}\r\nExpect: {expect}\r\n"
        f"Content-Length: {length or len(content)}\r\n\r\n".encode()
    )
    first = b""
    if version == "1.1":
        first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    if b" 100 " in first or version == "1.0":
        writer.write(content)
    last = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return first, last


async def test_gateway_sends_100_continue_when_the_client_expects_it() -> None:
    gateway, handler = Gateway(SamplingConfig()), RecordingHandler()
    url, key = await gateway.start(), gateway.open(handler)
    for expect in ("100-continue", "100-Continue"):
        first, last = await ask_with_expect(url, key, expect)
        assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert last.startswith(b"HTTP/1.1 200 ") and b'"content": "hi"' in last
    first, last = await ask_with_expect(url, key, version="1.0")
    assert last.startswith(b"HTTP/1.0 200 ") and b"100 Continue" not in last
    assert len(handler.calls) == 3
    await gateway.close()


async def test_gateway_sends_no_100_continue_when_the_headers_are_refused() -> None:
    gateway, handler = Gateway(SamplingConfig()), RecordingHandler()
    url, key = await gateway.start(), gateway.open(handler)
    refused = {
        b" 401 ": ask_with_expect(url, "sk-"),
        b" 413 ": ask_with_expect(url, key, length=MAX_BODY + 1),
    }
    for status, asked in refused.items():
        first, _ = await asked
        assert status in first.splitlines()[0]
    assert not handler.calls
    await gateway.close()
