"""Reads an engine's streams next to its server, and forwards them to the manager in few messages.

`StreamRelay` runs in the engine's host process. It reads the streams over HTTP and parses their
JSON. `RelayedEngine` is the client of the same engine in the rollout manager. It requests the new
tokens of all streams from the relay in one `TokenReport`, in a large run about every 100 ms. Its
other calls go directly to the engine's server.

Invariants
- A stream is only read while less than a chunk (`CHUNK_TOKENS`) of its tokens is unacknowledged.
  The consumer of a stream acknowledges tokens by requesting more, which it does only after the
  store has committed them. So a stream loses at most about one chunk if the host dies, and a slow
  disk slows down the engines instead of filling the memory.
- An abort is processed before more tokens are read. After an abort, aborted streams are read to
  their ends without waiting for acknowledgments. Few tokens remain, because the engine generates no
  more for them.
- Between two reports there is a pause, so that a report collects tokens of many streams (`Pace`).
- The failure of a stream ends only that stream. If the relay itself fails or no longer exists,
  every open stream ends with the error, so that none waits forever.
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
# Pause for each stream: with 4,000 or more streams, the longest pause results.
_PAUSE_PER_STREAM_SECONDS = 25e-6
# Pause for each engine. A report costs the manager about 0.5 ms, and with n engines n reports come
# in each pause of n * 10 ms, so reports use at most 5 % of the manager's time. From ten engines on,
# the pause stays at `_LONGEST_PAUSE_SECONDS`, and the share grows with the number of engines.
_PAUSE_PER_ENGINE_SECONDS = 10e-3
# Pause after an abort; short, because a weight update waits until aborted streams have ended.
_PAUSE_OF_ABORTS_SECONDS = 10e-3
# Largest number of streams in a report, which then has 0.5 MB if each stream has 64 tokens.
_MAX_STREAMS = 1024
# Number of items that are processed before other tasks of the event loop may run.
_ITEMS_IN_A_TURN = 64
_MAX_STARTED = 256  # Largest number of requests that one call starts.
_NEWS_SECONDS = 5.0
# Longest wait of `report` for news while tokens are unacknowledged. It is short, because a stream
# that reached its limit waits for an acknowledgment, which comes with the next call of `report`.
_NEWS_SECONDS_UNACKNOWLEDGED = 0.05

Started = tuple[int, GenerationRequest]

_NEVER_SENT = TokenChunk(np.zeros(0, "i4"), np.zeros(0, "f4"), PolicyVersion(-1, 0), "abort")


class StreamRelay:
    """Reads the token streams of one engine, and collects the tokens until the rollout manager
    requests them. Its methods must be called on one event loop."""

    def __init__(self, client: EngineClient, chunk_tokens: int) -> None:
        self._client = client
        self._outbox = Outbox(chunk_tokens)
        self._readers: dict[int, asyncio.Task[None]] = {}
        self._blocked: dict[int, asyncio.Event] = {}
        self._news = asyncio.Event()

    def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None:
        """Start to read the streams of `started` requests, and stop reading the streams in
        `canceled`.

        The engine is asked to abort a request whose stream is no longer read.
        """
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
        """Abort requests and read their streams to the end. `requests` has the stream number of
        each request id."""
        # Send the abort first: the streams that are woken below would otherwise delay it.
        await self._client.abort(list(requests))
        for stream in self._readers.keys() & requests.values():
            self._outbox.unbind(stream)
            self._wake(stream)

    async def report(self, acknowledged: Sequence[int]) -> TokenReport:
        """Return the tokens that were read since the last report.

        If there are none, wait for some. After a time limit, return an empty report.

        Args:
            acknowledged: Numbers of streams whose reported tokens are stored, so that more may be
                read.
        """
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
                pass  # Return an empty report. The manager then calls `report` again.
        return self._outbox.take(_MAX_STREAMS)

    async def close(self) -> None:
        """Stop reading all streams and close the client."""
        readers = list(self._readers.values())
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await self._client.close()

    async def _read(self, stream: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(self._client.generate(request)) as chunks:
                async for chunk in chunks:
                    if not self._outbox.accepts_more(stream):
                        await self._room(stream)
                    self._put(stream, chunk)
        except (EngineError, ComponentFailure) as failure:
            self._put(stream, failure)
        except Exception as defect:  # noqa: BLE001 - the manager raises it, which ends the run
            self._put(stream, ComponentFailure(f"reading a stream failed: {defect!r}"))

    async def _room(self, stream: int) -> None:
        """Wait until the manager has acknowledged so many tokens of `stream` that more may be read
        from it."""
        event = self._blocked[stream] = asyncio.Event()
        try:
            while not self._outbox.accepts_more(stream):
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
    """A `StreamRelay` in another process. Every call has a time limit and raises EngineError."""

    async def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None: ...

    async def abort(self, requests: Mapping[str, int]) -> None: ...

    async def report(self, acknowledged: Sequence[int]) -> TokenReport: ...


class Pace:
    """Determines the pause between two token reports of an engine. All engines of a run share one
    `Pace`.

    The pause grows with the number of engines and of streams (responses that are being generated).
    It is short in a small run, so that tokens arrive almost immediately. In a large run it is 0.1
    s, so each engine reports ten times per second.
    """

    def __init__(self) -> None:
        self.streams = 0
        self.engines = 0
        self.report_lock = asyncio.Lock()
        """Lock that is held while the report of one engine is processed, so that reports of several
        engines are processed one after the other."""

    @property
    def seconds(self) -> float:
        """Seconds from the arrival of one report to the request for the next."""
        return min(
            _LONGEST_PAUSE_SECONDS,
            max(self.streams * _PAUSE_PER_STREAM_SECONDS, self.engines * _PAUSE_PER_ENGINE_SECONDS),
        )


class _Inbox:
    """Queue of one stream's items (chunks of tokens, or a failure) for a single reader. It is
    smaller and faster than `asyncio.Queue`."""

    __slots__ = ("items", "reader")

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.reader: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        self.items.append(item)
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def news(self) -> asyncio.Future[None]:
        """Return a future that completes when an item is added."""
        self.reader = asyncio.get_running_loop().create_future()
        return self.reader


class RelayedEngine(ForwardingClient):
    """Client of an engine whose token streams are read and forwarded by a `StreamRelay` next to the
    engine's server; other calls go directly to the server."""

    def __init__(self, client: EngineClient, relay: RelayCalls, pace: Pace) -> None:
        super().__init__(client)
        self._relay = relay
        self._pace = pace
        self._numbers = itertools.count()
        self._inboxes: dict[int, _Inbox] = {}
        self._started: list[Started] = []
        self._canceled: list[int] = []
        self._running: dict[str, int] = {}  # Stream number of each running request, by request id.
        self._aborted: set[str] = set()
        self._hurried = asyncio.Event()
        self._acknowledged: list[int] = []
        self._sending: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._closed = False

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the response to `request`. Canceling or closing the iteration aborts the
        request."""
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
        """End these requests early; the stream of each ends with a chunk of `end="abort"`."""
        unwanted = {name: self._running[name] for name in request_ids if name in self._running}
        streams = set(unwanted.values())
        for stream in [stream for stream, _ in self._started if stream in streams]:
            self._inboxes[stream].put(_NEVER_SENT)
        self._started = [started for started in self._started if started[0] not in streams]
        if self._sending is not None:
            # The relay ignores an abort of a request that it does not know, so wait until the
            # starts of all requests are sent.
            await asyncio.wait([self._sending])
        self._aborted |= self._running.keys() & unwanted.keys()
        # Set before the abort is sent: it ends the pause between reports, and streams may end
        # before the engine replies to the abort.
        self._hurried.set()
        await self._relay.abort(unwanted)

    async def close(self) -> None:
        """Close the client's connections, and fail its open streams; the server continues."""
        self._closed = True
        tasks = [task for task in (self._sending, self._receiving) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fail(EngineError(f"{self.engine_id} ({self.url}): the client has been closed"))
        await super().close()

    def _send(self) -> None:
        """Ensure that two background tasks run: one sends started and canceled streams to the
        relay, the other requests reports from the relay."""
        if self._sending is None or self._sending.done():
            self._sending = asyncio.create_task(self._guarded(self._send_all))
        if self._receiving is None or self._receiving.done():
            self._receiving = asyncio.create_task(self._guarded(self._receive))

    async def _send_all(self) -> None:
        while self._started or self._canceled:
            started, self._started = self._started[:_MAX_STARTED], self._started[_MAX_STARTED:]
            canceled: list[int] = []
            # A cancellation must not be sent before the start of its stream, so send cancellations
            # only with the last starts.
            if not self._started:
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
            async with self._pace.report_lock:
                for number, (stream, item) in enumerate(report.items(), 1):
                    if (inbox := self._inboxes.get(stream)) is not None:
                        inbox.put(item)
                    if number % _ITEMS_IN_A_TURN == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(0)
            # The relay probably has more to report if a report is full, so request the next report
            # without a pause.
            if len(report.runs_R7) < _MAX_STREAMS:
                await self._pause()

    async def _pause(self) -> None:
        """Wait before the next report is requested, so that the relay collects more tokens. After
        an abort wait only briefly, because a weight update waits for the ends of the aborted
        streams."""
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
        """End every open stream with `failure`."""
        self._started, self._canceled = [], []
        for inbox in self._inboxes.values():
            inbox.put(type(failure)(str(failure)))
