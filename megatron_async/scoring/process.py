"""One scorer process as its worker drives it: start, requests with deadlines, a complete end.

Invariants
- A reply is taken only from the process that reported ready (the kernel names the sender of every
  packet) and only for a request that waits for one: the id of a request is random. Everything else
  on the reply channel is discarded and counted in `stray`.
- No wait is without a limit, not even while stray packets keep coming.
- After `end`, nothing that the scorer started is left (see `process_main`).
- It belongs to one event loop and never blocks it. `end` blocks; `finish` calls it in a thread.
- The pipe of requests is written to here, not by a transport: `end` closes the pipe, and uvloop
  would close the number of the descriptor again, which may be another file's by then.
"""

import asyncio
import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Final

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import ComponentFailure, ProcessKilled, UserError
from megatron_async.process_backends.child_process import ChildProcess, module_command
from megatron_async.scoring.frames import (
    END_ID,
    LARGEST_REPLY_BYTES,
    START_ID,
    WAITING,
    parse_reply,
    request_frame,
)
from megatron_async.scoring.jobs import ScoreJob

START_TIMEOUT_SECONDS: Final = 120.0

_CANCEL_SECONDS: Final = 5.0
_END_TIMEOUT_SECONDS: Final = 75.0  # more than a keeper takes at most to end what is left
_CONTINUE_SECONDS: Final = 0.2
_PACKETS_AT_ONCE: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")  # process, user and group id of a packet's sender
_MODULE: Final = "megatron_async.scoring.process_main"

Reply = dict[str, Any]


class ScorerTimeout(TimeoutError):
    """No reply within the limit."""

    fault = "scorer_timeout"


class ScorerCrash(RuntimeError):
    """The process ended before it replied."""

    fault = "scorer_crash"


class StartHangs(ComponentFailure):
    """A scorer process that was alive and had not answered in time after its start."""


class ScorerProcess:
    """A running scorer. `closed`: it is asked nothing more, and is to be ended."""

    def __init__(self, settings: ScorerSettings, kind: str) -> None:
        """Start it, for the running event loop; `ready` waits for it."""
        self.stray = 0
        self.pid = 0
        self.closed = False
        self._why = ""  # of the end
        self._scorer: int | None = None
        self._settings = settings
        self._kind = kind
        self._exit_code: int | None = None
        self._output = ""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._keeper = ChildProcess(
                module_command(_MODULE, settings.model_dump_json(), kind),
                stdin=subprocess.PIPE,
                stdout=theirs.fileno(),
                bufsize=0,
            )
        assert self._keeper.stdin is not None
        self.requests = self._keeper.stdin
        os.set_blocking(self.requests.fileno(), False)
        self._ended = os.pidfd_open(self._keeper.pid)
        self._loop = asyncio.get_running_loop()
        self._unsent = bytearray()
        self._ending = threading.Lock()
        self._started: asyncio.Future[Reply | None] = self._loop.create_future()
        self._replies = {START_ID: self._started}  # None: it has ended
        for descriptor in (self._channel.fileno(), self._ended):
            self._loop.add_reader(descriptor, self._readable)

    async def ready(self) -> list[bool]:
        """Wait until it can be asked; ends it where it cannot. Which rewards are asynchronous.

        Raises UserError for settings it refuses, ProcessKilled when a signal ended it, StartHangs
        when it has not answered in time, and ComponentFailure for every other failure.
        """
        try:
            first = await self._within(self._started, START_TIMEOUT_SECONDS)
        except (ScorerTimeout, ScorerCrash) as error:
            await self.finish()
            names = ", ".join(part.name for part in self._settings.parts)
            why = f"a scorer process of reward {names} did not start ({error}): {self._output}"
            if self._keeper.returncode < 0 or (self._exit_code or 0) < 0:
                raise ProcessKilled(why) from error
            if isinstance(error, ScorerTimeout):
                raise StartHangs(why) from error
            raise ComponentFailure(why) from error
        if "user_error" in first:
            await self.finish()
            raise UserError(first["user_error"])
        return [bool(waits) for waits in first["asynchronous"]]

    async def stream_replies(self, work: Sequence[ScoreJob]) -> AsyncIterator[Reply]:
        """Ask for scores; a reply for each piece of work in turn, each within its limit.

        A score that passes its limit is canceled; a process that does not acknowledge that hangs
        itself, and is closed. Raises ScorerTimeout or ScorerCrash.
        """
        asked = [(secrets.token_hex(8), piece) for piece in work]
        replies = [self._request(number, piece) for number, piece in asked]
        for (number, piece), reply in zip(asked, replies, strict=True):
            limit = self._settings.limit_seconds(self._settings.parts[piece.part])
            try:
                found = await self._within(reply, limit)
            except ScorerTimeout:
                if self._kind == WAITING and not self.closed:
                    self._send({"id": number})
                    await asyncio.wait([reply], timeout=_CANCEL_SECONDS)
                if not reply.done():
                    self.stop("it hangs")
                raise
            yield found

    def take_stray(self) -> int:
        """Packets discarded since the last call."""
        count, self.stray = self.stray, 0
        return count

    def stop(self, why: str) -> None:
        """Ask it nothing more; who waits gets ScorerCrash."""
        if self.closed:
            return
        self.closed, self._why = True, why
        if self._loop.is_closed():
            return
        self._loop.remove_writer(self.requests.fileno())
        for descriptor in (self._channel.fileno(), self._ended):
            self._loop.remove_reader(descriptor)
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply.set_result(None)

    async def finish(self) -> None:
        """Stop it, and end it in a thread."""
        self.stop("it ended")
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End a stopped process and all that it started. A second call waits for the first."""
        with self._ending:
            if not self.requests.closed:
                self._end()

    def _end(self) -> None:
        self.requests.close()
        if self._scorer is not None:  # it may stop its keeper, again and again
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._scorer, signal.SIGKILL)
        deadline = time.monotonic() + _END_TIMEOUT_SECONDS
        ended = False
        while not ended and time.monotonic() < deadline:
            self._keeper.send_signal(signal.SIGCONT)
            ended = _ready(self._ended, _CONTINUE_SECONDS)
            with suppress(BlockingIOError, ScorerCrash):
                for _ in range(_PACKETS_AT_ONCE):
                    self._packet()
        if not ended:
            self._keeper.kill()
        self._keeper.reap()
        self._channel.close()
        for descriptor in (self._ended, self._scorer):
            if descriptor is not None:
                os.close(descriptor)

    def _request(self, number: str, piece: ScoreJob) -> "asyncio.Future[Reply | None]":
        """Send a piece of work; its reply. Raises ScorerCrash."""
        if self.closed:
            raise ScorerCrash(self._why)
        reply = self._replies[number] = self._loop.create_future()
        self._send({"id": number, "wanted": vars(piece)})
        return reply

    async def _within(self, reply: "asyncio.Future[Reply | None]", seconds: float) -> Reply:
        """A reply, if it comes within a limit. Raises ScorerTimeout or ScorerCrash."""
        await asyncio.wait([reply], timeout=seconds)
        if not reply.done():
            raise ScorerTimeout("no reply within the limit")
        found = reply.result()
        if found is None:
            raise ScorerCrash(self._why)
        return found

    def _send(self, content: dict[str, Any]) -> None:
        if not self._unsent:
            self._loop.add_writer(self.requests.fileno(), self._writable)
        self._unsent += request_frame(content)

    def _writable(self) -> None:
        try:
            del self._unsent[: os.write(self.requests.fileno(), self._unsent)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._unsent.clear()  # its end is noticed by the replies
        if not self._unsent:
            self._loop.remove_writer(self.requests.fileno())

    def _readable(self) -> None:
        """Take packets that have arrived, or note the end; a few at a time, to share the loop."""
        try:
            for _ in range(_PACKETS_AT_ONCE):
                self._packet()
        except BlockingIOError:
            if _ready(self._ended, 0.0):
                self.stop("it was killed")
        except ScorerCrash as crash:
            self.stop(str(crash))

    def _packet(self) -> None:
        """Take a packet. Raises BlockingIOError where none has come, ScorerCrash at the end."""
        packet, credentials, _, _ = self._channel.recvmsg(
            LARGEST_REPLY_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT
        )
        if not credentials:  # not even an empty packet: all ends are closed
            raise ScorerCrash("it ended without a reply")
        sender = _CREDENTIALS.unpack(credentials[0][2])[0]
        reply = parse_reply(packet) or {"id": ""}
        name = reply["id"]
        if sender == self._keeper.pid and name == END_ID:
            self._exit_code, self._output = reply["exit_code"], reply["output"]
            raise ScorerCrash(f"it ended with exit code {self._exit_code}")
        if name == START_ID and not self.pid:
            self.pid = sender
            with suppress(ProcessLookupError):  # it has ended already
                self._scorer = os.pidfd_open(sender)
        waits = self._replies.pop(name, None) if sender == self.pid else None
        if waits is None:
            self.stray += 1
        else:
            waits.set_result(reply)


def _ready(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
