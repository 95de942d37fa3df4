"""The one process of asynchronous rewards: hundreds of scores wait in its event loop at once.

Invariants
- A score that passes its limit is cancelled there. A process that does not acknowledge that within
  `_CANCEL_SECONDS` hangs itself: it is ended, and another one starts.
- What was under way when the process ended is asked for again, at the third and last try one score
  after the other: the one that ends the process must not cost the others their reward.
- It belongs to one event loop, which it never blocks but for the end (`close`).
"""

import asyncio
import os
import secrets
import time
from contextlib import nullcontext
from typing import Any, Final

from megatron_async.config.reward import ScorerSettings
from megatron_async.scoring.frames import WAITING, reply_id, request_frame
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.process import ScorerCrash, ScorerProcess, ScorerTimeout
from megatron_async.scoring.work import Work, failed, scores_of

_CANCEL_SECONDS: Final = 5.0
_TRIES: Final = 3
_PACKETS_AT_ONCE: Final = 64


class WaitingScorer:
    """The scorer process of asynchronous rewards, started when first needed."""

    def __init__(self, settings: ScorerSettings) -> None:
        self._settings = settings
        self._gates = [asyncio.Semaphore(part.concurrency) for part in settings.parts]
        self._alone = asyncio.Lock()
        self._link: asyncio.Task[_Link] | None = None
        self.restarts = 0

    async def score(self, work: Work) -> list[ResponseScore]:
        """Score it within its limit. Raises UserError or ComponentFailure of a start."""
        limit = self._settings.limit_seconds(self._settings.parts[work.part])
        async with self._gates[work.part]:
            began = time.monotonic()
            for number in range(_TRIES):
                try:
                    async with self._alone if number == _TRIES - 1 else nullcontext():
                        reply = await (await self._connected()).ask(work, limit)
                except ScorerTimeout as error:
                    return failed(self._settings, error.fault, work, _since(began), error)
                except ScorerCrash as error:
                    crash = error
                    continue
                return scores_of(self._settings, reply, work, _since(began))
            return failed(self._settings, crash.fault, work, _since(began), crash)

    def close(self) -> None:
        """End the process; scores that wait for it have crashed."""
        if self._link is not None and self._link.done() and self._link.exception() is None:
            self._link.result().close()
        elif self._link is not None:
            self._link.cancel()

    async def _connected(self) -> "_Link":
        link = self._link
        if link is not None and link.done() and (link.exception() or link.result().closed):
            self.restarts += 1
            self._link = None
        if self._link is None:
            self._link = asyncio.create_task(_Link.start(self._settings))
        return await asyncio.shield(self._link)  # bounded: a process start is


class _Link:
    """The connection to one process, from when it is ready until it is closed.

    Its pipe is written to here, not by a transport: the process closes the pipe when it ends, and
    uvloop would close the number of the descriptor again, which may be another file's by then.
    """

    def __init__(self, process: ScorerProcess) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._replies: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._unsent = bytearray()
        self.closed = False
        self._loop.add_reader(process.fileno(), self._readable)

    @classmethod
    async def start(cls, settings: ScorerSettings) -> "_Link":
        process = await asyncio.to_thread(ScorerProcess, settings, WAITING)
        await asyncio.to_thread(process.ready)
        return cls(process)

    async def ask(self, work: Work, limit_seconds: float) -> dict[str, Any]:
        """Ask the process for scores. Raises ScorerTimeout or ScorerCrash."""
        if self.closed:
            raise ScorerCrash("it ended")
        number = secrets.token_hex(8)
        name = reply_id(number, 0)
        reply = self._replies[name] = self._loop.create_future()
        try:
            self._send({"id": number, "wanted": [vars(work)]})
            done, _ = await asyncio.wait([reply], timeout=limit_seconds)
            if done:
                return reply.result()
            self._send({"id": number})
            done, _ = await asyncio.wait([reply], timeout=_CANCEL_SECONDS)
            if not done:
                self.close()  # it hangs: nothing in it is served any more
            raise ScorerTimeout("no reply within the limit")
        finally:
            self._replies.pop(name, None)
            if reply.done() and not reply.cancelled():
                reply.exception()  # an unread one would be logged

    def close(self) -> None:
        """End the process; who waits gets ScorerCrash."""
        if self.closed:
            return
        self.closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._process.fileno())
            self._loop.remove_writer(self._process.requests.fileno())
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(ScorerCrash("it ended"))
        self._process.end()

    def _send(self, content: dict[str, Any]) -> None:
        if self.closed:
            return
        if not self._unsent:
            self._loop.add_writer(self._process.requests.fileno(), self._writable)
        self._unsent += request_frame(content)

    def _writable(self) -> None:
        descriptor = self._process.requests.fileno()
        try:
            del self._unsent[: os.write(descriptor, self._unsent)]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self.close()
            return
        if not self._unsent:
            self._loop.remove_writer(descriptor)

    def _readable(self) -> None:
        for _ in range(_PACKETS_AT_ONCE):
            try:
                reply = self._process.take()
            except ScorerCrash:
                self.close()
                return
            if reply is None:
                return
            future = self._replies.get(reply["id"])
            if future is not None and not future.done():
                future.set_result(reply)


def _since(began: float) -> float:
    return time.monotonic() - began
