"""Calls over Unix sockets: one connection for each, on which a request and its reply go by length.

Invariants
- A server answers only processes of its own user, whatever the rights of the socket's file are.
- A handler goes on when its caller is gone.
- A connection that breaks before the reply, or that cannot be made, is `Broken`: the server has
  died. Where too many wait already it is made later: the server is stopped, or slow.
"""

import asyncio
import os
import select
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from megatron_async.runtime.time_limits import STEP_SECONDS, AwakeDeadline

_LENGTH: Final = struct.Struct(">Q")
_CREDENTIALS: Final = struct.Struct("3i")  # process, user and group id of the peer
_WAITING_CALLS: Final = 4096
_BUFFER_BYTES: Final = 1 << 20

Handler = Callable[[bytes], Awaitable[bytes]]


class Broken(Exception):
    """The server of a socket is not there, or has died before its reply."""


@contextmanager
def _breaking() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise Broken from error


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
    with _breaking():
        opened = await _connect(path)
        reader, writer = await asyncio.open_unix_connection(sock=opened, limit=_BUFFER_BYTES)
        try:
            writer.write(_LENGTH.pack(len(request)))
            writer.write(request)
            return await _read(reader)
        finally:
            writer.transport.abort()  # a server that hangs does not take the rest of the request


async def _connect(path: Path) -> socket.socket:
    opened = socket.socket(socket.AF_UNIX)
    try:
        opened.setblocking(False)
        while not _connected(opened, path):
            await asyncio.sleep(STEP_SECONDS)
    except BaseException:
        opened.close()
        raise
    return opened


def _connected(opened: socket.socket, path: Path) -> bool:
    """Connect if there is room; False where too many calls wait, which cannot be polled for."""
    try:
        opened.connect(str(path))
    except BlockingIOError:
        return False
    return True


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


def ask(path: Path, request: bytes, limit: float, while_waiting: Callable[[], None]) -> bytes:
    """`call` from code that blocks, for `limit` seconds awake at most; then TimeoutError.

    Raises Broken, and what `while_waiting` raises.
    """
    deadline = AwakeDeadline(limit)

    def steps(event: int) -> Iterator[None]:
        """Give one turn for each time that the socket is ready."""
        poll = select.poll()
        poll.register(opened, event)
        while deadline.left:
            ready = poll.poll(1000 * min(deadline.left, STEP_SECONDS))
            deadline.tick()
            if ready:
                yield
            else:
                while_waiting()
        raise TimeoutError

    with socket.socket(socket.AF_UNIX) as opened:
        opened.setblocking(False)
        while True:
            with _breaking():
                if _connected(opened, path):
                    break
            if not deadline.left:
                raise TimeoutError
            time.sleep(min(deadline.left, STEP_SECONDS))
            deadline.tick()
            while_waiting()
        unsent = memoryview(_LENGTH.pack(len(request)) + request)
        reply, wanted = bytearray(), _LENGTH.size
        for _ in steps(select.POLLOUT):
            with _breaking():
                unsent = unsent[opened.send(unsent) :]
            if not unsent:
                break
        for _ in steps(select.POLLIN):
            with _breaking():
                piece = opened.recv(min(wanted - len(reply), _BUFFER_BYTES))
            if not piece:
                raise Broken
            reply += piece
            if len(reply) == _LENGTH.size == wanted:
                wanted += _LENGTH.unpack(reply)[0]
            if len(reply) == wanted:
                break
        return bytes(memoryview(reply)[_LENGTH.size :])
