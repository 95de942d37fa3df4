"""What a server answers to a streamed request, in whatever pieces it arrives."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Any, cast

import pytest

from megatron_async.engines.sglang.stream import BadReport, Refusal
from megatron_async.engines.sglang.stream_connection import StreamConnection, StreamConnections

HEAD = b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b"data: {}\n\n" * 3, b"data: " + b"x" * 300 + b"\n\n", b"data: [DONE]\n\n"]
UNREAD = [2, 2]  # the answer that is left in the middle: the second of the second connection
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"


class Wire:
    """Where requests go; what it brings is read while `reading`."""

    reading = True

    def write(self, data: bytes) -> None:
        assert data == b"a request"

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True


MOST = 1 << 20


class Served:
    """A connection whose answers are fed by hand."""

    def __init__(self) -> None:
        self.wire, self.connection = Wire(), StreamConnection()
        self.connection.connection_made(cast(Any, self.wire))
        self.feed = self.connection.data_received
        self.connection.send(b"a request", MOST)

    async def body(self) -> bytes:
        body = b""
        while (part := await self.connection.part()) is not None:
            body += part
        return body


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 10_000])
async def test_a_chunked_answer_is_what_was_sent_in_whatever_pieces_it_arrives(piece: int) -> None:
    served = Served()
    reading = asyncio.create_task(served.body())
    answer = HEAD + CHUNKS
    for start in range(0, len(answer), piece):
        served.feed(answer[start : start + piece])
        await asyncio.sleep(0)
    assert await reading == b"".join(EVENTS)
    assert served.connection.reusable


async def test_each_part_is_there_as_soon_as_it_has_arrived() -> None:
    served = Served()
    served.feed(HEAD + b"3\r\nabc\r\n5;of=five\r\nde")
    assert await served.connection.part() == b"abc"
    served.feed(b"fgh\r\n")
    assert await served.connection.part() == b"defgh"
    assert not served.connection.reusable


@pytest.mark.parametrize(
    ("answer", "again"),
    [
        (b"HTTP/1.1 400 Bad Request\r\ncontent-length: 8\r\n\r\ntoo long", True),
        (b"HTTP/1.1 400 \r\nTransfer-Encoding: chunked\r\n\r\n8\r\ntoo long\r\n0\r\n\r\n", True),
        (b"HTTP/1.1 400 \r\nConnection: close\r\nContent-Length: 8\r\n\r\ntoo long", False),
    ],
)
async def test_a_refusal_has_its_reason_whatever_its_form(answer: bytes, again: bool) -> None:
    served = Served()
    served.feed(answer)
    with pytest.raises(Refusal, match="status 400: too long"):
        await served.body()
    assert served.connection.reusable is again


async def test_an_error_may_end_with_its_connection() -> None:
    served = Served()
    served.feed(b"HTTP/1.0 503 Busy\r\n\r\nlater")
    served.connection.eof_received()
    with pytest.raises(BadReport, match="status 503: later"):
        await served.body()
    assert not served.connection.reusable


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 okay\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabcdef",
        HEAD + b"-3\r\nabcdef\r\n",
        HEAD + b"3" * (1 << 18),
        HEAD + b"zz\r\nabc\r\n",
        HEAD + b"3\r\nabcdef\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 18),
    ],
)
async def test_what_is_no_http_is_a_bad_report(answer: bytes) -> None:
    served = Served()
    served.feed(answer)
    with pytest.raises(BadReport, match="what is no HTTP"):
        await served.body()
    assert not served.connection.reusable


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"%x\r\n" % (MOST + 1),
        b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (MOST + 1),
        b"HTTP/1.0 200 OK\r\n\r\n",
        b"HTTP/1.0 503 Busy\r\n\r\n",
        b"HTTP/1.1 503 Busy\r\nTransfer-Encoding: chunked\r\n\r\n" + b"10000\r\n",
    ],
    ids=["chunk", "length", "no length", "error", "error in chunks"],
)
async def test_answer_is_refused_when_it_is_too_large(head: bytes) -> None:
    served = Served()
    reading = asyncio.create_task(served.body())
    served.feed(head)
    for _ in range(64):
        await asyncio.sleep(0)
        if reading.done():
            break
        served.feed(b"x" * (1 << 16) + (b"\r\n10000\r\n" if b"503 Busy\r\nT" in head else b""))
    with pytest.raises(BadReport, match=r"what is no HTTP: a part of \d+ bytes, where 1048576"):
        await reading
    assert len(served.connection._buffer) <= MOST + (1 << 17)


async def test_a_server_that_sends_more_than_is_asked_for_waits() -> None:
    served = Served()
    for _ in range(3):
        served.feed(b"%x\r\n%b\r\n" % (1 << 17, b"x" * (1 << 17)))
        await asyncio.sleep(0)
    assert not served.wire.reading


async def test_a_part_may_be_larger_than_what_is_read_ahead() -> None:
    served = Served()
    reading, piece = asyncio.create_task(served.body()), b"x" * (1 << 18)
    served.feed(HEAD + b"%x\r\n" % (4 * len(piece)))
    for _ in range(4):
        served.feed(piece)
        await asyncio.sleep(0)
        assert served.wire.reading, "it waits for the rest"
    served.feed(b"\r\n0\r\n\r\n")
    assert await reading == 4 * piece


async def test_bytes_behind_an_answer_are_no_part_of_the_next() -> None:
    served = Served()
    served.feed(HEAD + CHUNKS + b"HTTP/1.1 200 OK")
    assert await served.body() == b"".join(EVENTS)
    assert not served.connection.reusable


@pytest.mark.parametrize("arrived", [b"", b"\x00\x01", HEAD, HEAD + CHUNKS[:40]])
async def test_a_connection_that_ends_in_the_middle_has_broken_off(arrived: bytes) -> None:
    served = Served()
    served.feed(arrived)
    served.connection.eof_received()
    with pytest.raises(ConnectionError, match="broke off"):
        await served.body()


async def test_a_connection_is_used_again_after_a_whole_answer_and_only_then() -> None:
    _ = Served()
    served: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(0)
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # it was closed
            while head := await reader.readuntil(b"\r\n\r\n"):
                assert head.startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
                assert b"Authorization: Bearer k\r\n" in head
                await reader.readexactly(2)
                served[-1] += 1
                writer.write(HEAD + CHUNKS[:40])
                if served != UNREAD:
                    writer.write(CHUNKS[40:])

    async def ask() -> None:
        async with aclosing(connections.post("generate", b"{}", MOST)) as parts:
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
    async with aclosing(connections.post("generate", b"{}", MOST)) as parts:
        await anext(parts)
    assert not connections._idle, "it is closed at once, so that the engine ends the request"
    await ask()
    assert served == [*UNREAD, 1], "what is left of an answer is not the next one's"
    connections.close()
    server.close()
