"""Makes and serves calls over Unix sockets, with one connection for each call.

On a connection, the request and then its reply are sent, each after its length in bytes.

Invariants
- A server replies only to processes of its own user, whatever the permissions of the socket's file
  are.
- A handler continues if its caller disconnects.
- A connection that cannot be made, or that breaks before the reply, raises `Broken`, because the
  server then does not exist or has died. Connecting is retried only if too many calls wait in the
  socket: the server then exists, but it is stopped or slow.
"""

import asyncio
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from megatron_async.runtime.time_limits import STEP_SECONDS

_LENGTH: Final = struct.Struct(">Q")
_CREDENTIALS: Final = struct.Struct("3i")  # process, user and group id of the peer
_WAITING_CALLS: Final = 4096
_BUFFER_BYTES: Final = 1 << 20

Handler = Callable[[bytes], Awaitable[bytes]]


class Broken(Exception):
    """Error of a call whose server does not exist, or died before its reply."""


def listen(path: Path) -> socket.socket:
    """Create a listening Unix socket at `path` and return it; calls wait in it for a server.

    An existing file at `path` is replaced.
    """
    path.unlink(missing_ok=True)
    opened = socket.socket(socket.AF_UNIX)
    opened.bind(str(path))
    opened.listen(_WAITING_CALLS)
    return opened


async def serve(listening: socket.socket, handle: Handler) -> None:
    """Serve calls on a listening socket forever: send each caller what `handle` returns.

    `handle` gets the bytes of a request and returns those of the reply.
    """

    async def reply_to(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # These errors mean that the caller disconnected.
        with suppress(OSError, EOFError), closing(writer):
            if _user_of(writer.get_extra_info("socket")) != os.getuid():
                return
            reply = await handle(await _read(reader))
            writer.write(_LENGTH.pack(len(reply)))
            writer.write(reply)
            await writer.drain()

    server = await asyncio.start_unix_server(
        reply_to, sock=listening, limit=_BUFFER_BYTES, backlog=_WAITING_CALLS
    )
    await server.serve_forever()


def _user_of(connected: socket.socket) -> int:
    """Return the user ID of the process at the other end of a connection."""
    credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(credentials)[1])


async def call(path: Path, request: bytes) -> bytes:
    """Send `request` to the server of the socket at `path`, and return its reply.

    Raises:
        Broken: The server does not exist, or died before its reply.
    """
    try:
        opened = await _connect(path)
        reader, writer = await asyncio.open_unix_connection(sock=opened, limit=_BUFFER_BYTES)
        try:
            writer.write(_LENGTH.pack(len(request)))
            writer.write(request)
            return await _read(reader)
        finally:
            # Abort the connection instead of closing it normally. That would wait until the request
            # is sent completely, which never happens if the server hangs.
            writer.transport.abort()
    except (OSError, EOFError) as error:
        raise Broken from error


async def _connect(path: Path) -> socket.socket:
    """Return a connection to the socket at `path`; retry while too many calls wait there."""
    opened = socket.socket(socket.AF_UNIX)
    try:
        opened.setblocking(False)
        while True:
            try:
                opened.connect(str(path))
                return opened
            except BlockingIOError:
                # Too many calls wait in the socket. No event reports when one can be added, so
                # retry after a while.
                await asyncio.sleep(STEP_SECONDS)
    except BaseException:
        opened.close()
        raise


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Read one message, which follows its length, from a connection."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
