"""Reads an engine's streams where its server is, and hands them on in few messages.

`StreamRelay` lives in the engine's host: HTTP, JSON and versions are its work. `RelayedEngine` is
the same engine for the rollout manager: an `EngineClient` whose streams come from the relay, all of
them in one `TokenReport` about every 100 ms, and whose other calls go to the server as they are.

Invariants
- A stream is read on only while less than a chunk of it is unacknowledged, and what is read is
  acknowledged when whoever iterates asks for more, which is after the store has committed it. So
  the loss of the host costs a stream one chunk, and a slow disk slows the engines.
- An abort is heard before more is read, and then its streams are read to their ends: the engine
  adds nothing to them, and each comes as one item.
- Longer pauses mean fewer messages: `Pace` sets the pause, which is short for few streams.
- A failure belongs to its stream; one of the relay itself reaches every open stream. None waits
  for a relay that is gone.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Protocol

import numpy as np

from megatron_async.engines.interface import (
    EngineClient,
    EngineError,
    ForwardingClient,
    GenerationRequest,
    TokenChunk,
)
from megatron_async.engines.token_report import Failure, Item, Outbox, TokenReport
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import PolicyVersion

_LONGEST_PAUSE_SECONDS = 0.1
_PAUSE_PER_STREAM_SECONDS = 25e-6  # 4,096 streams: the longest pause
_PAUSE_PER_ENGINE_SECONDS = 10e-3  # a message takes the manager about half a millisecond
_PAUSE_OF_ABORTS_SECONDS = 10e-3  # an update waits for their ends
_MOST_STREAMS = 1024  # of a report: 64 tokens of each are half a megabyte
_ITEMS_IN_A_TURN = 64  # of the manager's event loop
_MOST_STARTED = 256  # in one call
_NEWS_SECONDS = 5.0
# A stream that has no room waits for an acknowledgement, which comes with the next call.
_NEWS_SECONDS_UNACKNOWLEDGED = 0.05

Started = tuple[int, GenerationRequest]

_NEVER_SENT = TokenChunk(np.zeros(0, "i4"), np.zeros(0, "f4"), PolicyVersion(-1, 0), "abort")


class StreamRelay:
    """Reads the streams of one engine; all calls come from one event loop."""

    def __init__(self, client: EngineClient, chunk_tokens: int) -> None:
        self._client = client
        self._outbox = Outbox(chunk_tokens)
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._blocked: dict[int, asyncio.Event] = {}
        self._news = asyncio.Event()

    def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None:
        """Begin to read these requests; stop reading those streams, which ends their requests."""
        for stream, request in started:
            task = asyncio.create_task(self._read(stream, request))
            self._readers[stream] = task
            task.add_done_callback(partial(self._ended, stream))
        for stream in canceled:
            if (reader := self._readers.get(stream)) is not None:
                reader.cancel()
            self._outbox.forget(stream)

    def _ended(self, stream: int, _: asyncio.Task[None]) -> None:
        del self._readers[stream]

    async def abort(self, requests: Mapping[str, int]) -> None:
        """End these requests, whose streams are given; see `EngineClient.abort`."""
        await self._client.abort(list(requests))  # first: to read on takes the event loop's time
        for stream in self._readers.keys() & requests.values():
            self._outbox.unbind(stream)
            self._wake(stream)

    async def report(self, acknowledged: Sequence[int]) -> TokenReport:
        """Return the tokens since the last report; waits a little while for the first."""
        self._outbox.acknowledge(acknowledged)
        for stream in acknowledged:
            self._wake(stream)
        if not len(self._outbox):
            self._news.clear()
            waits = self._outbox.unacknowledged
            try:
                async with asyncio.timeout(
                    _NEWS_SECONDS_UNACKNOWLEDGED if waits else _NEWS_SECONDS
                ):
                    await self._news.wait()
            except TimeoutError:
                pass  # an empty report: the manager asks again
        return self._outbox.take(_MOST_STREAMS)

    async def close(self) -> None:
        """Stop reading."""
        readers = list(self._readers.values())
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await self._client.close()

    async def _read(self, stream: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(self._client.generate(request)) as chunks:
                async for chunk in chunks:
                    if not self._outbox.has_room(stream):
                        await self._room(stream)
                    self._put(stream, chunk)
        except (EngineError, ComponentFailure) as failure:
            self._put(stream, failure)
        except Exception as defect:  # noqa: BLE001 - it ends the run, from the manager
            self._put(stream, ComponentFailure(f"reading a stream failed: {defect!r}"))

    async def _room(self, stream: int) -> None:
        """Wait until the manager has acknowledged what it has."""
        event = self._blocked[stream] = asyncio.Event()
        try:
            while not self._outbox.has_room(stream):
                event.clear()
                await event.wait()
        finally:
            del self._blocked[stream]

    def _wake(self, stream: int) -> None:
        if (blocked := self._blocked.get(stream)) is not None:
            blocked.set()

    def _put(self, stream: int, item: Item) -> None:
        self._outbox.put(stream, item)
        self._news.set()


class RelayCalls(Protocol):
    """A `StreamRelay` in another process. Every call has a limit and raises EngineError."""

    async def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None: ...

    async def abort(self, requests: Mapping[str, int]) -> None: ...

    async def report(self, acknowledged: Sequence[int]) -> TokenReport: ...


class Pace:
    """Pause of a run's engines between two reports; one for all of them.

    It grows with the streams and engines that are read: the shortest responses of a small run come
    almost at once, and a large one takes ten messages a second and engine.
    """

    def __init__(self) -> None:
        self.streams = 0
        self.engines = 0
        self.turn = asyncio.Lock()
        """Of the engine whose report is taken up in this turn of the event loop."""

    @property
    def seconds(self) -> float:
        """Seconds between one report's arrival and the question for the next."""
        return min(
            _LONGEST_PAUSE_SECONDS,
            max(self.streams * _PAUSE_PER_STREAM_SECONDS, self.engines * _PAUSE_PER_ENGINE_SECONDS),
        )


class _Inbox:
    """Items of one stream for its only reader: a queue of asyncio is eight objects, and slower."""

    __slots__ = ("items", "reader")

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.reader: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self.items.append(item)
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def news(self) -> asyncio.Future[None]:
        """Done when there is an item."""
        self.reader = asyncio.get_running_loop().create_future()
        return self.reader


class RelayedEngine(ForwardingClient):
    """An engine whose streams are read by its relay."""

    def __init__(self, client: EngineClient, relay: RelayCalls, pace: Pace) -> None:
        super().__init__(client)
        self._relay = relay
        self._pace = pace
        self._numbers = itertools.count()
        self._inboxes: dict[int, _Inbox] = {}
        self._started: list[Started] = []
        self._canceled: list[int] = []
        self._running: dict[str, int] = {}  # streams, by their requests
        self._aborted: set[str] = set()
        self._hurried = asyncio.Event()
        self._acknowledged: list[int] = []
        self._sending: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._closed = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream a response. Canceling or closing the iteration aborts the request."""
        if self._closed:
            raise EngineError(f"{self.engine_id} ({self.url}): the client has been closed")
        stream, inbox = next(self._numbers), _Inbox()
        self._inboxes[stream] = inbox
        self._running[request.request_id] = stream
        self._pace.streams += 1
        self._started.append((stream, request))
        self._send()
        ended = False
        try:
            while not ended:
                if not inbox.items:
                    await inbox.news()
                item = inbox.items.pop(0)
                if not isinstance(item, TokenChunk):
                    raise item
                ended = item.end is not None
                yield item
                if not inbox.items:
                    self._acknowledged.append(stream)
        finally:
            self._pace.streams -= 1
            self._running.pop(request.request_id, None)
            self._aborted.discard(request.request_id)
            del self._inboxes[stream]
            if not ended and not self._closed:
                self._canceled.append(stream)
                self._send()

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; each stream ends with a chunk of `end="abort"`."""
        unwanted = {name: self._running[name] for name in request_ids if name in self._running}
        streams = set(unwanted.values())
        for stream in [stream for stream, _ in self._started if stream in streams]:
            self._inboxes[stream].put(_NEVER_SENT)
        self._started = [started for started in self._started if started[0] not in streams]
        if self._sending is not None:
            await asyncio.wait([self._sending])  # an abort that comes first is lost
        self._aborted |= self._running.keys() & unwanted.keys()
        self._hurried.set()  # first: ends come before the engine's own answer does
        await self._relay.abort(unwanted)

    async def close(self) -> None:
        """Release connections (not the server)."""
        self._closed = True
        tasks = [task for task in (self._sending, self._receiving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(EngineError(f"{self.engine_id} ({self.url}): the client has been closed"))
        await super().close()

    def _send(self) -> None:
        """Send starts and cancellations to the relay, and ask for reports."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._guarded(self._send_all))
        if self._receiving is None or self._receiving.done():
            self._receiving = asyncio.create_task(self._guarded(self._receive))

    async def _send_all(self) -> None:
        while self._started or self._canceled:
            started, self._started = self._started[:_MOST_STARTED], self._started[_MOST_STARTED:]
            canceled: list[int] = []
            if not self._started:  # never before its start
                canceled, self._canceled = self._canceled, []
            await self._relay.update(started, canceled)

    async def _receive(self) -> None:
        self._pace.engines += 1
        try:
            await self._receive_all()
        finally:
            self._pace.engines -= 1

    async def _receive_all(self) -> None:
        while self._inboxes:
            acknowledged, self._acknowledged = self._acknowledged, []
            report = await self._relay.report(acknowledged)
            async with self._pace.turn:
                for number, (stream, item) in enumerate(report.items(), 1):
                    if (inbox := self._inboxes.get(stream)) is not None:
                        inbox.put(item)
                    if number % _ITEMS_IN_A_TURN == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(0)
            if len(report.runs_R7) < _MOST_STREAMS:  # else there is more already
                await self._pause()

    async def _pause(self) -> None:
        """Let news gather for a while; not for long when requests are about to end."""
        self._hurried.clear()
        seconds = self._pace.seconds
        if self._aborted:
            seconds = min(seconds, _PAUSE_OF_ABORTS_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._hurried.wait()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (EngineError, ComponentFailure) as failure:
            self._fail(failure)
        except Exception as defect:  # noqa: BLE001 - raised by every open stream
            self._fail(ComponentFailure(f"the relay of {self.engine_id} failed: {defect!r}"))

    def _fail(self, failure: Failure) -> None:
        """No stream that is open gets anything more."""
        self._started, self._canceled = [], []
        for inbox in self._inboxes.values():
            inbox.put(type(failure)(str(failure)))
