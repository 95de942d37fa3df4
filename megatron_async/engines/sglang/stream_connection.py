"""HTTP connections on which an engine streams its reports, one request after the other.

A protocol of asyncio and a reader of what SGLang's server answers: with thousands of requests,
aiohttp takes more CPU time for each than all else that an engine's host does with it, and
asyncio's streams take twice as much as this.

Invariants
- What is no HTTP/1.1 answer is a `BadReport`, a connection that ends in the middle of one a
  `ConnectionError`, which also a closed pool raises for what is still read.
- A connection is used again only after a whole answer, and not when the server may be closing it;
  one that a server which stood still has closed all the same is a `KeptConnectionLost`.
- At most `_MOST_UNREAD` bytes and one read of the socket are buffered ahead of the reader. A chunk,
  a body without chunks or an error body that is larger than the request allows raises `BadReport`
  before it is read completely.
"""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from http.client import OK
from typing import cast
from urllib.parse import urlsplit

from megatron_async.engines.sglang.stream import BadReport, refusal_of

# Loopback or a rack's network; long, since a server on a loaded machine accepts slowly.
CONNECT_SECONDS = 30.0
# Below the server's own limit (5 s): a request on a connection that it is just closing is lost.
KEEP_ALIVE_SECONDS = 2.0
_LONGEST_LINE = 1 << 16
_MOST_UNREAD = 1 << 17


class KeptConnectionLost(ConnectionError):
    """A connection from an earlier answer ended without a byte of the next one."""


class StreamConnection(asyncio.Protocol):
    """Brings the answers to one request after the other."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = self._paused = False
        self._reusable_until = 0.0

    # ------------------------------------------------------------ called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if len(self._buffer) > _MOST_UNREAD and not self._paused:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def eof_received(self) -> None:
        self.connection_lost(None)

    def connection_lost(self, error: Exception | None) -> None:
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # ------------------------------------------------------------ called by who reads

    @property
    def unanswered(self) -> bool:
        """Return whether nothing has come of the answer to the last request."""
        return not (self._status or self._buffer)

    @property
    def reusable(self) -> bool:
        """Return whether the last answer was whole and another request may be sent now."""
        quiet = not (self._ended or self._paused or self._buffer)
        return quiet and time.monotonic() < self._reusable_until

    def send(self, request: bytes, most: int) -> None:
        """Send the next request; `most` limits each chunk of its answer, in bytes."""
        self._status, self._whole, self._reusable_until = 0, False, 0.0
        self._most = most
        self._transport.write(request)

    async def part(self) -> bytes | None:
        """Return what has arrived of the answer's body; None at its end.

        Raises BadReport (Refusal), ConnectionError.
        """
        try:
            if not self._status:
                await self._head()
            if self._status == OK:
                return await self._body()
            body = b""
            while (part := await self._body()) is not None:
                body += part
                self._check_size(len(body))
            raise refusal_of(self._status, body.decode(errors="replace"))
        except BadReport:
            raise
        except ValueError as error:
            raise BadReport(f"the engine answered what is no HTTP: {error}") from error

    def close(self) -> None:
        """End the connection, and with it the request at the server."""
        self._transport.abort()

    async def _head(self) -> None:
        """Read the head of an answer: its status, and how its body ends."""
        while (end := self._find(b"\r\n\r\n", 0)) < 0:
            await self._more()
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        del self._buffer[: end + 4]
        protocol, _, rest = first.partition(" ")
        if not protocol.startswith("HTTP/1."):
            raise ValueError(repr(first[:40]))
        fields = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip().lower() for name, _, value in fields}
        length = headers.get("content-length", "")
        if length and not length.isdecimal():
            raise ValueError(f"a body of {length!r} bytes")
        self._length = int(length) if length else None  # up to the end of the connection
        self._chunked = headers.get("transfer-encoding") == "chunked"
        self._keeps_open = protocol == "HTTP/1.1" and headers.get("connection") != "close"
        self._status = int(rest[:3])

    async def _body(self) -> bytes | None:
        while not self._whole:
            data = self._chunks() if self._chunked else self._plain()
            if self._whole and self._keeps_open:
                self._reusable_until = time.monotonic() + KEEP_ALIVE_SECONDS
            if data:
                return data
            if not self._whole:
                await self._more()
        return None

    def _chunks(self) -> bytes:
        """The whole chunks that are there."""
        buffer, at, parts = self._buffer, 0, list[bytes]()
        while not self._whole and (line := self._find(b"\r\n", at)) >= 0:
            size = int(buffer[at:line].partition(b";")[0], 16)
            self._check_size(size)
            stop = line + 2 + size
            if len(buffer) < stop + 2:
                break
            if size < 0 or buffer[stop : stop + 2] != b"\r\n":
                raise ValueError(f"a chunk of {size} bytes that does not end there")
            parts.append(bytes(buffer[line + 2 : stop]))
            at, self._whole = stop + 2, not size
        del buffer[:at]
        return b"".join(parts)

    def _plain(self) -> bytes:
        """The body, once it is there whole."""
        length, there = self._length, len(self._buffer)
        self._check_size(there if length is None else length)
        self._whole = self._ended if length is None else there >= length
        body = bytes(self._buffer[:length]) if self._whole else b""
        del self._buffer[: len(body)]
        return body

    def _check_size(self, size: int) -> None:
        """Raise ValueError if a chunk or body of `size` bytes is larger than allowed."""
        if size > self._most:
            raise ValueError(f"a part of {size} bytes, where {self._most} are the most")

    def _find(self, end: bytes, start: int) -> int:
        """Find the end of the line from `start`; -1: further on than what is there."""
        at = self._buffer.find(end, start)
        if at < 0 and len(self._buffer) - start > _LONGEST_LINE:
            raise ValueError(f"a line of more than {_LONGEST_LINE} bytes")
        return at

    async def _more(self) -> None:
        """Wait until more has arrived. Raises ConnectionError when nothing will."""
        if self._ended:
            raise ConnectionError("the stream broke off: the connection was closed")
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter


class StreamConnections:
    """Connections to one server; those that have brought their answer are used again."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[StreamConnection] = []
        self._open: set[StreamConnection] = set()

    async def post(self, path: str, body: bytes, most: int) -> AsyncGenerator[bytes, None]:
        """Send a request and yield the body of its answer, in parts.

        `most` limits each chunk, and a body without chunks, in bytes.

        Raises OSError, TimeoutError, BadReport (Refusal), ConnectionError, KeptConnectionLost.
        """
        head = f"POST /{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        while self._idle and not self._idle[-1].reusable:
            self._idle.pop().close()
        kept = bool(self._idle)
        connection = self._idle.pop() if kept else await self._connected()
        self._open.add(connection)
        try:
            connection.send(head.encode("latin-1") + body, most)
            while (part := await connection.part()) is not None:
                yield part
        except ConnectionError as error:
            if kept and connection.unanswered and connection in self._open:
                self._forget_kept()  # they are as old
                raise KeptConnectionLost(str(error)) from error
            raise
        finally:
            if connection in self._open and connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            self._open.discard(connection)

    def close(self) -> None:
        """End all connections, also those that are read."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._forget_kept()

    def _forget_kept(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connected(self) -> StreamConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            transport, connection = await loop.create_connection(
                StreamConnection, self._host, self._port
            )
        # A host that is gone ends no connection by itself.
        opened = transport.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A name is looked up once, and not for each of thousands of streams.
        self._host = transport.get_extra_info("peername")[0]
        return connection
