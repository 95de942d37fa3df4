"""Calls over Unix sockets: one connection for each, on which a request and its reply go by length.

Invariants
- A server answers only processes of its own user, whatever the rights of the socket's file are.
- A handler goes on when its caller is gone.
- A connection that breaks before the reply, or that cannot be made, is `Broken`: the server has
  died. Where too many wait already it is made later: the server is stopped, or slow.
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
    """The server of a socket is not there, or has died before its reply."""


def listen(path: Path) -> socket.socket:
    """A socket at `path`, in place of any that was there; calls wait in it for a server."""
    path.unlink(missing_ok=True)
    opened = socket.socket(socket.AF_UNIX)
    opened.bind(str(path))
    opened.listen(_WAITING_CALLS)
    return opened


async def serve(listening: socket.socket, handle: Handler) -> None:
    """Answer calls for ever."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, EOFError), closing(writer):  # the caller is gone
            if _user_of(writer.get_extra_info("socket")) != os.getuid():
                return
            reply = await handle(await _read(reader))
            writer.write(_LENGTH.pack(len(reply)))
            writer.write(reply)
            await writer.drain()

    server = await asyncio.start_unix_server(
        answer, sock=listening, limit=_BUFFER_BYTES, backlog=_WAITING_CALLS
    )
    await server.serve_forever()


def _user_of(connected: socket.socket) -> int:
    found = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(found)[1])


async def call(path: Path, request: bytes) -> bytes:
    """The reply to `request`. Raises Broken."""
    try:
        opened = await _connect(path)
        reader, writer = await asyncio.open_unix_connection(sock=opened, limit=_BUFFER_BYTES)
        try:
            writer.write(_LENGTH.pack(len(request)))
            writer.write(request)
            return await _read(reader)
        finally:
            writer.transport.abort()  # a server that hangs does not take the rest of the request
    except (OSError, EOFError) as error:
        raise Broken from error


async def _connect(path: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX)
    try:
        opened.setblocking(False)
        while True:
            try:
                opened.connect(str(path))
                return opened
            except BlockingIOError:  # too many calls wait, which cannot be polled for
                await asyncio.sleep(STEP_SECONDS)
    except BaseException:
        opened.close()
        raise


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)
