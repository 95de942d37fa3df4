"""HTTP connections on which an engine streams its reports, one request after the other.

A small reader of what SGLang's server answers: with thousands of streams, a general one takes more
CPU time than all that an engine's actor does with their tokens.

Invariants
- What is no HTTP/1.1 answer is a `BadReport`, a connection that ends in the middle of one a
  `ConnectionError`, which also a closed pool raises for what is still read.
- A connection is used again only after a whole answer, and not when the server may be closing it.
- What nobody reads stays in the sockets but for `_MOST_UNREAD` bytes.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast
from urllib.parse import urlsplit

from megatron_async.engines.sglang.stream import BadReport

# Loopback or a rack's network; long, since a server on a loaded machine accepts slowly.
CONNECT_SECONDS = 30.0
# Below the server's own limit (5 s): a request on a connection that it is just closing is lost.
KEEP_ALIVE_SECONDS = 2.0
_MOST_UNREAD = 1 << 18
_LONGEST_HEAD = 1 << 16
_LINE_END = b"\r\n"


class StreamConnection(asyncio.Protocol):
    """Reads the answers to one request after the other.

    `status` is that of the newest answer, 0 before it is known.
    """

    def __init__(self) -> None:
        self.status = 0
        self.ended = True
        self.used_at = 0.0
        self._raw = bytearray()
        self._body = bytearray()
        self._left: int | None = None  # bytes of a body that has a length
        self._chunked = False
        self._keep = False
        self._paused = False
        self._lost: Exception | None = None
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def reusable(self) -> bool:
        """Return whether another request may be sent now."""
        young = time.monotonic() - self.used_at < KEEP_ALIVE_SECONDS
        return self.ended and self._keep and young and self._lost is None and not self._raw

    def send(self, request: bytes) -> None:
        """Begin a request; its answer is what `read` returns from now on."""
        assert self._transport is not None
        self.status, self.ended = 0, False
        self._transport.write(request)

    async def read(self) -> bytes:
        """The next part of the body; empty at its end. Raises BadReport, ConnectionError."""
        while not self._body and not self.ended:
            if self._lost is not None:
                raise self._lost
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        part = bytes(self._body)
        self._body.clear()
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        self.used_at = time.monotonic()
        return part

    def close(self) -> None:
        """End the connection, and with it the request at the server."""
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        opened = transport.get_extra_info("socket")
        with suppress(OSError):  # a host that is gone ends no connection by itself
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        self._raw += data
        try:
            if self.status or self._take_head():
                self._take_body()
        except ValueError as error:
            self._lost = BadReport(f"the engine answered what is no HTTP: {error}")
            self.close()
        if len(self._body) > _MOST_UNREAD and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._body or self.ended or self._lost:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self.status and not self._chunked and self._left is None:
            self.ended = True  # a body that ends with its connection
        if self._lost is None:
            why = error or "the connection was closed"
            self._lost = ConnectionError(f"the stream broke off: {why}")
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take_head(self) -> bool:
        """Return whether there is a whole one. Raises ValueError."""
        end = self._raw.find(b"\r\n\r\n")
        if end < 0:
            if len(self._raw) > _LONGEST_HEAD or not b"HTTP/1.".startswith(self._raw[:7]):
                raise ValueError(repr(bytes(self._raw[:40])))
            return False
        first, *lines = bytes(self._raw[:end]).decode("latin-1").split("\r\n")
        protocol, _, rest = first.partition(" ")
        if not protocol.startswith("HTTP/1."):
            raise ValueError(repr(first[:40]))
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        self.status = int(rest[:3])
        self._chunked = headers.get("transfer-encoding", "").lower() == "chunked"
        length = headers.get("content-length")
        self._left = None if self._chunked or length is None else int(length)
        self._keep = protocol == "HTTP/1.1" and headers.get("connection", "").lower() != "close"
        del self._raw[: end + 4]
        return True

    def _take_body(self) -> None:
        """Move what has arrived of the body there. Raises ValueError."""
        raw = self._raw
        if not self._chunked:
            self._body += raw
            if self._left is not None:
                self._left -= len(raw)
                self.ended = self._left <= 0
            raw.clear()
            return
        start = 0
        while not self.ended:
            line = raw.find(_LINE_END, start)
            if line < 0:
                break
            size = int(bytes(raw[start:line]).partition(b";")[0], 16)
            stop = line + 2 + size
            if stop + 2 > len(raw):
                break
            if raw[stop : stop + 2] != _LINE_END:
                raise ValueError(f"a chunk of {size} bytes that does not end there")
            self._body += raw[line + 2 : stop]
            self.ended = size == 0
            start = stop + 2
        del raw[:start]


class StreamConnections:
    """Connections to one server; those that have brought their answer are used again."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[StreamConnection] = []
        self._open: set[StreamConnection] = set()
        self.closed = False

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[StreamConnection]:
        """Send a request; the connection brings its answer. Raises OSError, TimeoutError."""
        head = f"POST /{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        connection = self._reused() or await self._connected()
        self._open.add(connection)
        try:
            connection.send(head.encode("latin-1") + body)
            yield connection
        finally:
            self._open.discard(connection)
            if connection.reusable and not self.closed:
                self._idle.append(connection)
            else:
                connection.close()

    def close(self) -> None:
        """End all connections, also those that are read."""
        self.closed = True
        for connection in (*self._open, *self._idle):
            connection.close()
        self._idle.clear()

    def _reused(self) -> StreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
            connection.close()
        return None

    async def _connected(self) -> StreamConnection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            made: tuple[Any, StreamConnection] = await loop.create_connection(
                StreamConnection, self._host, self._port
            )
        transport, connection = made
        # A name is looked up once, and not for each of thousands of streams.
        self._host = transport.get_extra_info("peername")[0]
        return connection
