"""What a server answers to a streamed request, in whatever pieces it arrives."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from megatron_async.engines.sglang import stream_connection
from megatron_async.engines.sglang.stream import BadReport
from megatron_async.engines.sglang.stream_connection import StreamConnection, StreamConnections

HEAD = b"HTTP/1.1 200 OK\r\nServer: uvicorn\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [b"data: {}\n\n" * 3, b"data: " + b"x" * 300 + b"\n\n", b"data: [DONE]\n\n"]
CHUNKS = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in EVENTS) + b"0\r\n\r\n"


@dataclass
class Transport:
    """Notes what is asked of it."""

    written: bytes = b""
    asked: list[str] = field(default_factory=list)

    def get_extra_info(self, name: str) -> Any:
        return self

    def setsockopt(self, *_: Any) -> None:
        return None

    def write(self, data: bytes) -> None:
        self.written += data

    def __getattr__(self, name: str) -> Any:
        return lambda: self.asked.append(name)


def asked() -> tuple[StreamConnection, Transport]:
    """A connection on which a request has been sent."""
    connection, transport = StreamConnection(), Transport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.send(b"a request")
    return connection, transport


def body_of(connection: StreamConnection) -> bytes:
    async def read() -> bytes:
        parts = b""
        while part := await connection.read():
            parts += part
        return parts

    return asyncio.run(asyncio.wait_for(read(), 10))


@pytest.mark.parametrize("piece", [1, 2, 7, 64, 10_000])
def test_a_chunked_answer_is_what_was_sent_in_whatever_pieces_it_arrives(piece: int) -> None:
    connection, _ = asked()
    answer = HEAD + CHUNKS
    for start in range(0, len(answer), piece):
        connection.data_received(answer[start : start + piece])
    assert body_of(connection) == b"".join(EVENTS)
    assert connection.status == 200 and connection.reusable


def test_each_part_can_be_read_as_soon_as_it_is_there() -> None:
    async def body() -> None:
        connection, _ = asked()
        reading = asyncio.create_task(connection.read())
        await asyncio.sleep(0)
        connection.data_received(HEAD + b"3\r\nabc\r\n5\r\nde")
        assert await reading == b"abc"
        connection.data_received(b"fgh\r\n")
        assert await connection.read() == b"defgh"

    asyncio.run(asyncio.wait_for(body(), 10))


def test_an_error_has_a_length_or_ends_with_its_connection() -> None:
    connection, _ = asked()
    connection.data_received(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 8\r\n\r\ntoo long")
    assert body_of(connection) == b"too long"
    assert connection.status == 400 and connection.reusable
    connection.send(b"another")
    connection.data_received(b"HTTP/1.1 503 \r\nConnection: close\r\n\r\nbusy")
    connection.connection_lost(None)
    assert body_of(connection) == b"busy"
    assert connection.status == 503 and not connection.reusable


@pytest.mark.parametrize(
    "answer",
    [
        b"\x00\x01\x02",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 okay\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        HEAD + b"zz\r\nabc\r\n",
        HEAD + b"3\r\nabcdef\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * (1 << 17),
    ],
)
def test_what_is_no_http_is_a_bad_report_and_ends_the_connection(answer: bytes) -> None:
    connection, transport = asked()
    connection.data_received(answer)
    with pytest.raises(BadReport, match="what is no HTTP"):
        body_of(connection)
    assert transport.asked == ["abort"] and not connection.reusable


@pytest.mark.parametrize("arrived", [b"", HEAD, HEAD + CHUNKS[:40]])
def test_a_connection_that_ends_in_the_middle_has_broken_off(arrived: bytes) -> None:
    connection, _ = asked()
    connection.data_received(arrived)
    connection.connection_lost(None)
    with pytest.raises(ConnectionError, match="broke off"):
        body_of(connection)


def test_what_nobody_reads_stays_in_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_connection, "_MOST_UNREAD", 500)
    connection, transport = asked()
    connection.data_received(HEAD + b"258\r\n%b\r\n" % (b"x" * 600))
    assert transport.asked == ["pause_reading"]
    connection.data_received(b"0\r\n\r\n")
    assert len(body_of(connection)) == 600
    assert transport.asked == ["pause_reading", "resume_reading"]


def test_a_connection_is_used_again_after_a_whole_answer_and_only_then() -> None:
    async def body() -> None:
        served: list[int] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            served.append(0)
            with suppress(asyncio.IncompleteReadError, ConnectionError):  # it was closed
                while head := await reader.readuntil(b"\r\n\r\n"):
                    assert head.startswith(b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1:")
                    await reader.readexactly(2)
                    served[-1] += 1
                    writer.write(HEAD + CHUNKS)

        async def ask(*, whole: bool) -> None:
            async with connections.post("generate", b"{}") as answer:
                while await answer.read() and whole:
                    pass

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connections = StreamConnections(f"http://127.0.0.1:{port}", {"Authorization": "Bearer k"})
        await ask(whole=True)
        await ask(whole=True)
        assert served == [2]
        connections._idle[0].used_at -= stream_connection.KEEP_ALIVE_SECONDS
        await ask(whole=True)
        assert served == [2, 1], "the server may be closing the old one"
        async with connections.post("generate", b"{}") as unread:
            assert not unread.ended
        await ask(whole=True)
        assert served == [2, 2, 1], "what is left of an answer is not the next one's"
        connections.close()
        server.close()

    asyncio.run(asyncio.wait_for(body(), 30))
