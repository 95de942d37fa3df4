"""What a server answers to a streamed request, in whatever pieces it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import pytest

from megatron_async.engines.sglang.stream import BadReport, Refusal
from megatron_async.engines.sglang.stream_connection import StreamConnection, StreamConnections

HEAD = b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b"data: {}\n\n" * 3, b"data: " + b"x" * 300 + b"\n\n", b"data: [DONE]\n\n"]
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"


class Writer:
    """Where requests go."""

    def write(self, data: bytes) -> None:
        assert data == b"a request"


class Served:
    """A connection whose answers are fed by hand."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()
        self.connection = StreamConnection(self.reader, cast(Any, Writer()))

    async def body(self) -> bytes:
        return b"".join([part async for part in self.connection.answer(b"a request")])


def run(scenario: Callable[[Served], Awaitable[None]]) -> None:
    async def body() -> None:
        await asyncio.wait_for(scenario(Served()), 30)

    asyncio.run(body())


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 10_000])
def test_a_chunked_answer_is_what_was_sent_in_whatever_pieces_it_arrives(piece: int) -> None:
    async def scenario(served: Served) -> None:
        reading = asyncio.create_task(served.body())
        answer = HEAD + CHUNKS
        for start in range(0, len(answer), piece):
            served.reader.feed_data(answer[start : start + piece])
            await asyncio.sleep(0)
        assert await reading == b"".join(EVENTS)
        assert served.connection.reusable

    run(scenario)


def test_each_part_is_there_as_soon_as_it_has_arrived() -> None:
    async def scenario(served: Served) -> None:
        parts = served.connection.answer(b"a request")
        served.reader.feed_data(HEAD + b"3\r\nabc\r\n5;of=five\r\nde")
        assert await anext(parts) == b"abc"
        served.reader.feed_data(b"fgh\r\n")
        assert await anext(parts) == b"defgh"
        assert not served.connection.reusable

    run(scenario)


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 8\r\n\r\ntoo long", True),
        (b"HTTP/1.1 400 \r\nTransfer-Encoding: chunked\r\n\r\n8\r\ntoo long\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 400 \r\nConnection: close\r\nContent-Length: 8\r\n\r\ntoo long", False),
    ],
)
def test_a_refusal_has_its_reason_whatever_its_form(answer: bytes, again: bool) -> None:
    async def scenario(served: Served) -> None:
        served.reader.feed_data(answer)
        with pytest.raises(Refusal, match="status 400: too long"):
            await served.body()
        assert served.connection.reusable is again

    run(scenario)


def test_an_error_may_end_with_its_connection() -> None:
    async def scenario(served: Served) -> None:
        served.reader.feed_data(b"HTTP/1.0 503 Busy\r\n\r\nlater")
        served.reader.feed_eof()
        with pytest.raises(BadReport, match="status 503: later"):
            await served.body()
        assert not served.connection.reusable

    run(scenario)


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 okay\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        HEAD + b"zz\r\nabc\r\n",
        HEAD + b"3\r\nabcdef\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 18),
    ],
)
def test_what_is_no_http_is_a_bad_report(answer: bytes) -> None:
    async def scenario(served: Served) -> None:
        served.reader.feed_data(answer)
        with pytest.raises(BadReport, match="what is no HTTP"):
            await served.body()
        assert not served.connection.reusable

    run(scenario)


@pytest.mark.parametrize("arrived", [b"", b"\x00\x01", HEAD, HEAD + CHUNKS[:40]])
def test_a_connection_that_ends_in_the_middle_has_broken_off(arrived: bytes) -> None:
    async def scenario(served: Served) -> None:
        served.reader.feed_data(arrived)
        served.reader.feed_eof()
        with pytest.raises(ConnectionError, match="broke off"):
            await served.body()

    run(scenario)


def test_a_connection_is_used_again_after_a_whole_answer_and_only_then() -> None:
    async def scenario(_: Served) -> None:
        served: list[int] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.append(0)
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # it was closed
                while head := await reader.readuntil(b"\r\n\r\n"):
                    assert head.startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
                    assert b"Authorization: Bearer k\r\n" in head
                    await reader.readexactly(2)
                    served[-1] += 1
                    writer.write(HEAD + CHUNKS)

        async def ask() -> None:
            async with connections.post("generate", b"{}") as parts:
                assert b"".join([part async for part in parts]) == b"".join(EVENTS)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = StreamConnections(f"http://127.0.0.1:{port}", {"Authorization": "Bearer k"})
        await ask()
        await ask()
        assert served == [2]
        connections._idle[0]._reusable_until = 0.0
        await ask()
        assert served == [2, 1], "the server may be closing the old one"
        async with connections.post("generate", b"{}") as parts:
            await anext(parts)
        await ask()
        assert served == [2, 2, 1], "what is left of an answer is not the next one's"
        connections.close()
        server.close()

    run(scenario)
