"""A worker's hold on one scorer process: start, request and reply with deadlines, a complete end.

Invariants
- A reply is taken only from the process that reported ready (the kernel names the sender of every
  packet) and only for the request that was asked: the id of a request is random. Everything else
  on the reply channel is discarded and counted in `stray`.
- No wait is without a limit, not even while stray packets keep coming.
- After `end`, nothing that the scorer started is left (see `process_main`).
"""

import os
import secrets
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

from megatron_async.config.reward import ScorerSettings
from megatron_async.errors import ComponentFailure, ProcessKilled, UserError
from megatron_async.places.child_process import ChildProcess, module_command
from megatron_async.scoring.frames import (
    BLOCKING,
    END_ID,
    LARGEST_REPLY_BYTES,
    START_ID,
    parse_reply,
    reply_id,
    request_frame,
)
from megatron_async.scoring.work import Work

START_TIMEOUT_SECONDS: Final = 120.0

_END_TIMEOUT_SECONDS = 75.0  # more than a keeper takes at most to end what is left
_CONTINUE_SECONDS = 0.2
_CREDENTIALS = struct.Struct("3i")  # process, user and group id of a packet's sender
_MODULE = "megatron_async.scoring.process_main"


class ScorerTimeout(TimeoutError):
    """No reply within the limit."""

    fault = "scorer_timeout"


class ScorerCrash(RuntimeError):
    """The process ended before it replied."""

    fault = "scorer_crash"


class StartHangs(ComponentFailure):
    """A scorer process that was alive and had not answered in time after its start."""


class ScorerProcess:
    """A running scorer, one request at a time."""

    def __init__(self, settings: ScorerSettings, kind: str = BLOCKING) -> None:
        """Starts it; `ready` waits for it."""
        self.stray = 0
        self.pid = 0
        self._scorer: int | None = None
        self._settings = settings
        self._exit_code: int | None = None
        self._output = ""
        self._replies, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._replies.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
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

    def ready(self) -> list[bool]:
        """Wait until it can be asked; ends it where it cannot. Which rewards are asynchronous.

        Raises UserError for settings it refuses, ProcessKilled when a signal ended it, StartHangs
        when it has not answered in time, and ComponentFailure for every other failure.
        """
        try:
            first = self._reply(START_ID, time.monotonic() + START_TIMEOUT_SECONDS)
            if "user_error" in first:
                raise UserError(first["user_error"])
        except (ScorerTimeout, ScorerCrash) as error:
            self.end()
            names = ", ".join(part.name for part in self._settings.parts)
            why = f"a scorer process of reward {names} did not start ({error}): {self._output}"
            if self._keeper.returncode < 0 or (self._exit_code or 0) < 0:
                raise ProcessKilled(why) from error
            if isinstance(error, ScorerTimeout):
                raise StartHangs(why) from error
            raise ComponentFailure(why) from error
        except BaseException:
            self.end()
            raise
        return [bool(waits) for waits in first["asynchronous"]]

    def alive(self) -> bool:
        """True until it has ended."""
        return not _ready(self._ended, 0.0)

    def ask(self, work: Sequence[Work]) -> Iterator[dict[str, Any]]:
        """Send a request for several scores; a reply for each in turn, each within its limit.

        Raises ScorerTimeout or ScorerCrash.
        """
        parts = self._settings.parts
        limits = [self._settings.limit_seconds(parts[piece.part]) for piece in work]
        number = secrets.token_hex(8)
        deadline = time.monotonic() + limits[0]
        wanted = [vars(piece) for piece in work]
        self._send(request_frame({"id": number, "wanted": wanted}), deadline)
        for place, limit in enumerate(limits):
            deadline = deadline if not place else time.monotonic() + limit
            yield self._reply(reply_id(number, place), deadline)

    def fileno(self) -> int:
        """Descriptor of the reply channel."""
        return self._replies.fileno()

    def take(self) -> dict[str, Any] | None:
        """A reply that has come, None when there is none. Raises ScorerCrash."""
        while _ready(self._replies.fileno(), 0.0):
            if (reply := self._packet()) is not None:
                return reply
        return None

    def take_stray(self) -> int:
        """Packets discarded since the last call."""
        count, self.stray = self.stray, 0
        return count

    def end(self) -> None:
        """End it and all that it started."""
        self.requests.close()
        if self._scorer is not None:  # it may stop its keeper, again and again
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._scorer, signal.SIGKILL)
        deadline = time.monotonic() + _END_TIMEOUT_SECONDS
        with suppress(ScorerCrash):
            while (now := time.monotonic()) < deadline:
                self._keeper.send_signal(signal.SIGCONT)
                with suppress(ScorerTimeout):
                    self._reply(END_ID, min(deadline, now + _CONTINUE_SECONDS))
        if not _ready(self._ended, deadline - time.monotonic()):
            self._keeper.kill()
        self._keeper.reap()
        self._replies.close()
        for descriptor in (self._ended, self._scorer):
            if descriptor is not None:
                os.close(descriptor)

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            self._wait(self.requests.fileno(), select.POLLOUT, deadline)
            try:
                view = view[os.write(self.requests.fileno(), view) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise ScorerCrash("it ended") from error

    def _reply(self, number: str, deadline: float) -> dict[str, Any]:
        """The reply with this id. Raises ScorerTimeout or ScorerCrash."""
        while True:
            self._wait(self._replies.fileno(), select.POLLIN, deadline)
            reply = self._packet()
            if reply is not None:
                if reply["id"] == number:
                    return reply
                self.stray += 1

    def _packet(self) -> dict[str, Any] | None:
        """The next packet if it is a reply of the scorer's. Raises ScorerCrash."""
        packet, credentials, _, _ = self._replies.recvmsg(
            LARGEST_REPLY_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size)
        )
        if not credentials:  # not even an empty packet: all ends are closed
            raise ScorerCrash("it ended without a reply")
        sender = _CREDENTIALS.unpack(credentials[0][2])[0]
        reply = parse_reply(packet) or {}
        if sender == self._keeper.pid and reply.get("id") == END_ID:
            self._exit_code, self._output = reply["exit_code"], reply["output"]
            raise ScorerCrash(f"it ended with exit code {self._exit_code}")
        if reply.get("id") == START_ID and not self.pid:
            self.pid = sender
            with suppress(ProcessLookupError):  # it has ended already
                self._scorer = os.pidfd_open(sender)
        if "id" in reply and sender == self.pid:
            return reply
        self.stray += 1
        return None

    def _wait(self, descriptor: int, event: int, deadline: float) -> None:
        """Wait until the descriptor is ready. Raises ScorerTimeout or ScorerCrash."""
        poll = select.poll()
        poll.register(descriptor, event)
        poll.register(self._ended, select.POLLIN)
        seconds = deadline - time.monotonic()
        ready = dict(poll.poll(1000 * seconds)) if seconds > 0 else {}
        if not ready:
            raise ScorerTimeout("no reply within the limit")
        if descriptor not in ready:
            raise ScorerCrash("it was killed")


def _ready(descriptor: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * max(0.0, seconds)))
