"""Tests that a closed client, or one that has lost its connection, raises EngineError.

A RuntimeError of aiohttp would count as a defect and end the run.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from megatron_async.config.rollout import EngineConfig, SamplingConfig
from megatron_async.engines.interface import EngineError, GenerationRequest, RequestRefused
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.weight_sync.http import EngineAddress, EngineCallError
from megatron_async.weight_sync.http import call as call_engine

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
META = {
    "prompt_tokens": 2,
    "completion_tokens": 1,
    "output_token_logprobs": [[-1.0, 7, None]],
    "finish_reason": None,
    "weight_versions": [{"version": "0.0", "start": 0, "end": 1}],
}


def report(wire_id: str, **changes: Any) -> dict[str, Any]:
    """Return the report of the first token of a request."""
    return {"output_ids": [7], "meta_info": {"id": wire_id, **META, **changes}}


async def test_client_calls_raise_engine_error_when_the_client_is_closed() -> None:
    client = SGLangClient("engine0", "http://127.0.0.1:9", EngineConfig())
    await client.close()
    for call in (client.version, client.status, client.flush_cache, client.resume):
        with pytest.raises(EngineError, match="the client has been closed"):
            await call()
    request = GenerationRequest("t1-1;", np.asarray([1, 2], np.int32), 4, SamplingConfig())
    with pytest.raises(EngineError, match="the client has been closed"):
        async for _ in client.generate(request):
            pass


@pytest.mark.parametrize("last_words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
async def test_stream_raises_engine_error_when_its_connection_breaks(last_words: bytes) -> None:
    """The connection breaks between two reads, or after bytes that belong to no HTTP response."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        length = re.search(rb"Content-Length: (\d+)", await reader.readuntil(b"\r\n\r\n"))
        body = orjson.loads(await reader.readexactly(int(length[1]) if length else 0))
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        event = b"data: " + orjson.dumps(report(body["rid"])) + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        await writer.drain()
        await lost.wait()
        writer.write(last_words)
        await asyncio.sleep(0.1)
        writer.transport.abort()

    lost = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = SGLangClient("engine0", f"http://127.0.0.1:{port}", EngineConfig())
    request = GenerationRequest("t1-1;", np.asarray([1, 2], np.int32), 4, SamplingConfig())
    stream = client.generate(request)
    assert (await anext(stream)).token_ids.tolist() == [7]
    lost.set()
    await asyncio.sleep(0.3)
    with pytest.raises(EngineError, match="generation of request t1-1; failed"):
        await anext(stream)
    await client.close()
    server.close()


@pytest.mark.parametrize(
    ("answer", "refused", "message"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 8\r\n\r\ntoo long", True, "400: too long"),
        (
            b"HTTP/1.1 400 \r\nTransfer-Encoding: chunked\r\n\r\n3\r\ntoo\r\n0\r\n\r\n",
            True,
            "400: too",
        ),
        (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", False, "status 302"),
        (b"HTTP/1.0 503 Busy\r\n\r\nlater", False, "status 503: later"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", False, "failed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", False, "failed"),
        (CHUNKED + b"zz\r\nabc\r\n", False, "failed"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (3 << 20), False, "without the end of a report"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nda", False, "failed"),
    ],
)
async def test_stream_raises_refusal_or_engine_error_when_its_reply_is_malformed(
    answer: bytes, refused: bool, message: str
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = SGLangClient("engine0", url, EngineConfig())
    request = GenerationRequest("t1-1;", np.asarray([1, 2], np.int32), 4, SamplingConfig())
    with pytest.raises(EngineError, match=message) as raised:
        await anext(client.generate(request))
    assert isinstance(raised.value, RequestRefused) is refused
    await client.close()
    server.close()


class ForgetfulServer:
    """Server that replies to one call on each connection and resets the connection at the next
    call."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for kept in (False, True):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = re.search(r"Content-Length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            if kept:
                writer.transport.abort()
                return
            self.calls.append(head.split()[1])
            body = b'{"weight_version": "0.7"}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)


async def test_call_is_retried_when_its_kept_connection_was_reset() -> None:
    """A server that was stopped for a while has closed the connections that the client kept."""
    forgetful = ForgetfulServer()
    server = await asyncio.start_server(forgetful.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = SGLangClient("engine0", url, EngineConfig())
    await client.flush_cache()
    for call in (client.flush_cache, client.version, client.resume):
        await call()
        # The call leaves a kept connection, which the server resets at the next call.
        await client.version()
    assert [name.split("?")[0] for name in forgetful.calls[:2]] == ["/flush_cache"] * 2
    with pytest.raises(EngineError, match="release_memory_occupation failed"):
        # This call is not retried, because SGLang fails if it has released its memory already.
        await client.release_memory()
    await client.close()
    server.close()


@pytest.mark.parametrize("aborted", [False, True])
async def test_request_is_retried_when_its_kept_connection_was_reset(
    aborted: bool,
) -> None:
    """The retry has another id, because SGLang may still abort the first id. A request that was to
    be aborted is not retried."""
    ids: list[str] = []
    kept: list[asyncio.StreamWriter] = []
    news = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"Content-Length: (\d+)", head)
            body = orjson.loads(await reader.readexactly(int(length[1]) if length else 0))
            if b"/abort_request" in head:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
                continue
            ids.append(body["rid"])
            news.set()
            # At the second request on a connection, all kept connections are reset.
            if writer in kept:
                for connection in kept:
                    connection.transport.abort()
                return
            kept.append(writer)
            # This wait makes the client open three connections.
            while len(ids) < 3:
                await asyncio.sleep(0.01)
            last = report(body["rid"], finish_reason={"type": "length"})
            event = b"data: " + orjson.dumps(last) + b"\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(event))
            writer.write(event)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = SGLangClient("engine0", url, EngineConfig())

    async def ask(name: str) -> list[int]:
        request = GenerationRequest(name, np.asarray([1, 2], np.int32), 1, SamplingConfig())
        return [int(t) async for chunk in client.generate(request) for t in chunk.token_ids]

    assert await asyncio.gather(*map(ask, ("t1-1;", "t2-1;", "t3-1;"))) == [[7]] * 3
    if not aborted:
        assert await ask("t4-1;") == [7]
        assert [rid.partition(";")[2] for rid in ids[3:]] == ["t4-1;"] * 2
        assert len(set(ids)) == 5
    else:
        client._unwanted["t4-1;"] = "its id"
        with pytest.raises(EngineError, match="generation of request t4-1; failed"):
            await ask("t4-1;")
        assert len(ids) == 4
    await client.close()
    server.close()


async def test_call_is_tried_twice_and_names_the_call_when_the_server_is_dead() -> None:
    calls = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    client = SGLangClient("engine0", url, EngineConfig())
    with pytest.raises(EngineError, match="POST /flush_cache"):
        await client.flush_cache()
    assert calls == 2
    await client.close()
    server.close()


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """Run a server that gives the same reply to every request; yield its URL."""

    async def serve(_: web.Request) -> web.Response:
        return web.Response(body=answer, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_call_fails_when_the_reply_is_too_large() -> None:
    """Calls of a trainer fail as well, with EngineCallError."""
    async with answering(b"[" * (17 << 20)) as url:
        client = SGLangClient("engine0", url, EngineConfig())
        with pytest.raises(EngineError, match="has more than 16777216 bytes"):
            await client.status()
        await client.close()
        call = partial(call_engine, EngineAddress("engine0", url), "GET", "health", None, 20.0)
        with pytest.raises(EngineCallError, match="has more than 16777216 bytes"):
            await asyncio.to_thread(call)


@pytest.mark.parametrize("checksum", [None, "", 7, ["a"]])
async def test_checksum_fails_when_the_reply_is_not_a_string(checksum: Any) -> None:
    async with answering(orjson.dumps({"per_engine_checksum": checksum})) as url:
        client = SGLangClient("engine0", url, EngineConfig())
        with pytest.raises(EngineError, match="its weights_checker is invalid: ValueError"):
            await client.checksum()
        await client.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "anything", None])
async def test_connect_fails_when_the_server_has_another_dtype(
    dtype: str | None,
) -> None:
    """The check of log-probs is exact only if engine and trainer compute in float32."""
    loads = [{"max_total_num_tokens": 1000}]
    answer = orjson.dumps({"loads": loads, "max_req_input_len": 100, "dtype": dtype})
    async with answering(answer) as url:
        with pytest.raises(EngineError, match=f"dtype is {dtype!r} instead of float32"):
            await SGLangClient.connect("engine0", url, EngineConfig(dtype="float32"))


async def test_call_fails_when_the_reply_is_truncated() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"success": true}')
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    call = partial(call_engine, EngineAddress("engine0", url), "GET", "health", None, 20.0)
    with pytest.raises(EngineCallError, match="IncompleteRead"):
        await asyncio.to_thread(call)
    server.close()
