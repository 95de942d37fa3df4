"""Provides the handle by which a worker starts, calls and ends one scorer process.

A scorer process runs reward functions. Its parent process, the keeper, kills everything that the
scorer process leaves behind (see `process_main`).

Invariants
- A reply is accepted only if it comes from the process that reported ready (the kernel names the
  sender of every packet) and has the random ID of a pending request. All other packets on the reply
  socket are discarded and counted in `stray`. So no other process can forge a score.
- Every wait has a time limit, even while stray packets keep arriving.
- After `end`, no process that the scorer process started is left.
- The handle belongs to one event loop and never blocks it. Only `end` blocks; `finish` calls `end`
  in a thread.
- This module writes to the pipe of requests without an asyncio transport. `end` closes the pipe. A
  transport of uvloop would later close the same descriptor number again, which may belong to
  another file by then.
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
    ASYNC,
    END_ID,
    MAX_REPLY_BYTES,
    START_ID,
    parse_reply,
    request_frame,
)
from megatron_async.scoring.jobs import ScoreJob

START_TIMEOUT_SECONDS: Final = 120.0

_CANCEL_SECONDS: Final = 5.0
# Time limit in seconds for the keeper to end the processes that its scorer process left. It is
# longer than the limit that the keeper sets itself (`process_main`).
_END_TIMEOUT_SECONDS: Final = 75.0
_CONTINUE_SECONDS: Final = 0.2
_PACKETS_AT_ONCE: Final = 64
_CREDENTIALS: Final = struct.Struct("3i")  # process, user and group id of a packet's sender
_MODULE: Final = "megatron_async.scoring.process_main"

Reply = dict[str, Any]


class ScorerTimeout(TimeoutError):
    """Raised when a scorer process did not reply within the time limit."""

    fault = "scorer_timeout"


class ScorerCrash(RuntimeError):
    """Raised when a scorer process ended, or was stopped, before it replied."""

    fault = "scorer_crash"


class StartHangs(ComponentFailure):
    """Raised when a started scorer process is alive but does not report ready in time."""


class ScorerProcess:
    """Handle of one scorer process: sends requests to it through a pipe, receives its replies as
    packets of a socket, and ends it.

    Attributes:
        stray: Number of received packets that were discarded because they were not replies.
        pid: Process ID of the scorer process; 0 until it is known.
        closed: Whether the process gets no more requests and is to be ended.
        requests: The pipe that requests are written to.
    """

    def __init__(self, settings: ScorerSettings, kind: str) -> None:
        """Start a scorer process, without waiting until it is ready (see `ready`).

        Args:
            settings: The rewards and their limits.
            kind: `BLOCKING` or `ASYNC`: which of the rewards the process runs, and how.
        """
        self.stray = 0
        self.pid = 0
        self.closed = False
        self._why_closed = ""
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
        # Futures of pending replies by request ID. `stop` sets their result to None, also when the
        # process has ended.
        self._started: asyncio.Future[Reply | None] = self._loop.create_future()
        self._replies = {START_ID: self._started}
        for descriptor in (self._channel.fileno(), self._ended):
            self._loop.add_reader(descriptor, self._readable)

    async def ready(self) -> list[bool]:
        """Wait until the scorer process is ready; return for each reward whether it is async.

        If the process does not become ready, it is ended.

        Raises:
            UserError: If the process refuses the settings.
            ProcessKilled: If a signal ended the process.
            StartHangs: If the process does not report ready within `START_TIMEOUT_SECONDS`.
            ComponentFailure: If the start fails for any other reason.
        """
        try:
            first = await self._within(self._started, START_TIMEOUT_SECONDS)
        except (ScorerTimeout, ScorerCrash) as error:
            await self.finish()
            names = ", ".join(reward.name for reward in self._settings.parts)
            why = f"scorer process of reward {names} did not start ({error}): {self._output}"
            if self._keeper.returncode < 0 or (self._exit_code or 0) < 0:
                raise ProcessKilled(why) from error
            if isinstance(error, ScorerTimeout):
                raise StartHangs(why) from error
            raise ComponentFailure(why) from error
        if "user_error" in first:
            await self.finish()
            raise UserError(first["user_error"])
        return [bool(is_async) for is_async in first["asynchronous"]]

    async def stream_replies(self, work: Sequence[ScoreJob]) -> AsyncIterator[Reply]:
        """Send the jobs to the scorer process; yield the reply to each job, in the order of `work`.

        The wait for each reply has the time limit of the job's reward. If an asynchronous score
        exceeds the limit, it is canceled. If the scorer process does not confirm the cancellation,
        or if a blocking score exceeds the limit, the process counts as hung and the handle is
        closed.

        Raises:
            ScorerTimeout: If a reply does not arrive within the limit.
            ScorerCrash: If the process ends before a reply.
        """
        sent = [(secrets.token_hex(8), job) for job in work]
        replies = [self._request(request_id, job) for request_id, job in sent]
        for (request_id, job), reply in zip(sent, replies, strict=True):
            limit = self._settings.limit_seconds(self._settings.parts[job.part])
            try:
                found = await self._within(reply, limit)
            except ScorerTimeout:
                if self._kind == ASYNC and not self.closed:
                    self._send({"id": request_id})
                    await asyncio.wait([reply], timeout=_CANCEL_SECONDS)
                if not reply.done():
                    self.stop("the process hangs")
                raise
            yield found

    def take_stray(self) -> int:
        """Return the number of discarded packets, which were not replies, since the last call."""
        count, self.stray = self.stray, 0
        return count

    def stop(self, why: str) -> None:
        """Close the handle: refuse further requests, and let pending requests raise ScorerCrash.

        The process keeps running until `end`. `why` is the message of the exceptions.
        """
        if self.closed:
            return
        self.closed, self._why_closed = True, why
        if self._loop.is_closed():
            return
        self._loop.remove_writer(self.requests.fileno())
        for descriptor in (self._channel.fileno(), self._ended):
            self._loop.remove_reader(descriptor)
        replies, self._replies = self._replies, {}
        for reply in replies.values():
            reply.set_result(None)

    async def finish(self) -> None:
        """Refuse further requests to the scorer process, and end the process in a thread."""
        self.stop("the process was ended")
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End the scorer process and all processes that it started; call `stop` before.

        A concurrent second call waits for the first; a later one does nothing.
        """
        with self._ending:
            if not self.requests.closed:
                self._end()

    def _end(self) -> None:
        """End the scorer process, its keeper and all processes that they started; close files.

        Closing the pipe of requests makes the keeper kill these processes. The keeper is killed if
        it has not ended after `_END_TIMEOUT_SECONDS`.
        """
        self.requests.close()
        # Kill the scorer process here too. Otherwise a reward function could keep its keeper from
        # working, by sending it SIGSTOP again and again.
        if self._scorer is not None:
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

    def _request(self, request_id: str, job: ScoreJob) -> "asyncio.Future[Reply | None]":
        """Send a job to the scorer process; return the future of its reply.

        Raises:
            ScorerCrash: If the handle is closed.
        """
        if self.closed:
            raise ScorerCrash(self._why_closed)
        reply = self._replies[request_id] = self._loop.create_future()
        self._send({"id": request_id, "wanted": vars(job)})
        return reply

    async def _within(self, reply: "asyncio.Future[Reply | None]", seconds: float) -> Reply:
        """Wait for a pending reply for at most `seconds`, and return it.

        Raises:
            ScorerTimeout: If the reply does not arrive in time.
            ScorerCrash: If the process ends, or the handle is closed, before the reply.
        """
        await asyncio.wait([reply], timeout=seconds)
        if not reply.done():
            raise ScorerTimeout("no reply within the limit")
        found = reply.result()
        if found is None:
            raise ScorerCrash(self._why_closed)
        return found

    def _send(self, content: dict[str, Any]) -> None:
        """Queue a message for the scorer process; `_writable` writes it when the pipe has space."""
        if not self._unsent:
            self._loop.add_writer(self.requests.fileno(), self._writable)
        self._unsent += request_frame(content)

    def _writable(self) -> None:
        """Write as many queued bytes to the pipe of requests as fit."""
        try:
            del self._unsent[: os.write(self.requests.fileno(), self._unsent)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            # The process has ended, so drop the requests. The end is noticed on the reply socket,
            # and the callers then get a ScorerCrash.
            self._unsent.clear()
        if not self._unsent:
            self._loop.remove_writer(self.requests.fileno())

    def _readable(self) -> None:
        """Receive packets that have arrived, or close the handle if the process has ended.

        A call receives at most `_PACKETS_AT_ONCE` packets, so that other tasks of the event loop
        run in between.
        """
        try:
            for _ in range(_PACKETS_AT_ONCE):
                self._packet()
        except BlockingIOError:
            if _ready(self._ended, 0.0):
                self.stop("the process was killed")
        except ScorerCrash as crash:
            self.stop(str(crash))

    def _packet(self) -> None:
        """Receive one packet, and set the result of the pending reply that it belongs to.

        Raises:
            BlockingIOError: If no packet has arrived.
            ScorerCrash: If the keeper reports the end of the scorer process, or the socket closed.
        """
        packet, credentials, _, _ = self._channel.recvmsg(
            MAX_REPLY_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size), socket.MSG_DONTWAIT
        )
        # Every packet has its sender's credentials, even an empty one. A result without them means
        # that all other ends of the socket are closed.
        if not credentials:
            raise ScorerCrash("the process ended without a reply")
        sender = _CREDENTIALS.unpack(credentials[0][2])[0]
        reply = parse_reply(packet) or {"id": ""}
        name = reply["id"]
        if sender == self._keeper.pid and name == END_ID:
            self._exit_code, self._output = reply["exit_code"], reply["output"]
            raise ScorerCrash(f"the process ended with exit code {self._exit_code}")
        if name == START_ID and not self.pid:
            self.pid = sender
            with suppress(ProcessLookupError):  # The process may have ended already.
                self._scorer = os.pidfd_open(sender)
        pending = self._replies.pop(name, None) if sender == self.pid else None
        if pending is None:
            self.stray += 1
        else:
            pending.set_result(reply)


def _ready(descriptor: int, seconds: float) -> bool:
    """Wait for at most `seconds` until `descriptor` is readable; return whether it is.

    A process descriptor (pidfd) is readable once its process has ended.
    """
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * seconds))
