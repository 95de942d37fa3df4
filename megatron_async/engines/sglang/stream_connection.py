"""HTTP connections on which an engine streams its reports, one request after the other.

asyncio's streams and a reader of what SGLang's server answers: with thousands of requests, aiohttp
takes more CPU time for each than all else that an engine's actor does with it.

Invariants
- What is no HTTP/1.1 answer is a `BadReport`, a connection that ends in the middle of one a
  `ConnectionError`, which also a closed pool raises for what is still read.
- A connection is used again only after a whole answer, and not when the server may be closing it.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from http.client import OK
from urllib.parse import urlsplit

from megatron_async.engines.sglang.stream import BadReport, refusal_of

# Loopback or a rack's network; long, since a server on a loaded machine accepts slowly.
CONNECT_SECONDS = 30.0
# Below the server's own limit (5 s): a request on a connection that it is just closing is lost.
KEEP_ALIVE_SECONDS = 2.0


class StreamConnection:
    """Brings the answers to one request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._reusable_until = 0.0

    @property
    def reusable(self) -> bool:
        """Return whether the last answer was whole and another request may be sent now."""
        return time.monotonic() < self._reusable_until and not self._reader.at_eof()

    async def answer(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """The body of the answer in parts. Raises BadReport (Refusal), ConnectionError."""
        self._reusable_until = 0.0
        self._writer.write(request)
        try:
            async with aclosing(self._parts()) as parts:
                async for part in parts:
                    yield part
        except asyncio.IncompleteReadError as error:
            raise ConnectionError("the stream broke off: the connection was closed") from error
        except BadReport:
            raise
        except (asyncio.LimitOverrunError, ValueError) as error:
            raise BadReport(f"the engine answered what is no HTTP: {error}") from error

    async def _parts(self) -> AsyncGenerator[bytes, None]:
        head = await self._reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        protocol, _, rest = first.partition(" ")
        if not protocol.startswith("HTTP/1."):
            raise ValueError(repr(first[:40]))
        status = int(rest[:3])
        fields = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip().lower() for name, _, value in fields}
        length, body = int(headers.get("content-length", -1)), b""
        if headers.get("transfer-encoding") != "chunked":
            body = await (self._reader.read() if length < 0 else self._reader.readexactly(length))
        else:
            while chunk := await self._chunk():
                if status == OK:
                    yield chunk
                else:
                    body += chunk
        if protocol == "HTTP/1.1" and headers.get("connection") != "close":
            self._reusable_until = time.monotonic() + KEEP_ALIVE_SECONDS
        if status != OK:
            raise refusal_of(status, body.decode(errors="replace"))
        yield body

    async def _chunk(self) -> bytes:
        """The next one; the last is empty."""
        line = await self._reader.readuntil(b"\r\n")
        size = int(line.partition(b";")[0], 16)
        chunk = await self._reader.readexactly(size + 2)
        if chunk[size:] != b"\r\n":
            raise ValueError(f"a chunk of {size} bytes that does not end there")
        return chunk[:size]

    def close(self) -> None:
        """End the connection, and with it the request at the server."""
        self._writer.transport.abort()


class StreamConnections:
    """Connections to one server; those that have brought their answer are used again."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        lines = {"Host": parts.netloc, "Content-Type": "application/json", **headers}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[StreamConnection] = []
        self._open: set[StreamConnection] = set()

    @asynccontextmanager
    async def post(self, path: str, body: bytes) -> AsyncIterator[AsyncGenerator[bytes, None]]:
        """The body of the answer. Raises OSError, TimeoutError, and what `answer` raises."""
        head = f"POST /{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        while self._idle and not self._idle[-1].reusable:
            self._idle.pop().close()
        connection = self._idle.pop() if self._idle else await self._connected()
        self._open.add(connection)
        try:
            async with aclosing(connection.answer(head.encode("latin-1") + body)) as answer:
                yield answer
        finally:
            if connection in self._open and connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            self._open.discard(connection)

    def close(self) -> None:
        """End all connections, also those that are read."""
        for connection in (*self._open, *self._idle):
            connection.close()
        self._open.clear()
        self._idle.clear()

    async def _connected(self) -> StreamConnection:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(self._host, self._port)
        opened = writer.get_extra_info("socket")
        # A host that is gone ends no connection by itself.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # A name is looked up once, and not for each of thousands of streams.
        self._host = writer.get_extra_info("peername")[0]
        return StreamConnection(reader, writer)
