"""The OpenAI chat API over HTTP, for agents on this machine: keys, limits, replies.

Invariants
- It listens on the loopback address and nowhere else. Nothing is written to a log.
- Every call needs a key, which belongs to one attempt of one agent; with none, a foreign or an
  ended one it gets 401, and of what else it holds nothing is read.
- Connections that have not shown a key are few, and end soon; so slow or idle ones, and thousands
  of them, cost agents nothing.
- A call goes on when its client leaves; who takes it up again is the owner's decision.
"""

import asyncio
import json
import resource
import secrets
import select
import socket
import time
from collections.abc import Mapping
from typing import Any, Final, Protocol

from aiohttp import HttpVersion11, web

from megatron_async.config.rollout import SamplingConfig
from megatron_async.environments.calls import Call
from megatron_async.environments.chat import (
    CallRefused,
    ChatAnswer,
    ChatCall,
    checked_call,
    model,
    models,
)
from megatron_async.environments.json_text import json_text

LOOPBACK: Final = "127.0.0.1"
LARGEST_BODY: Final = 16 << 20
MODEL: Final = "policy"
_ONE_MODEL: Final = "/v1/models/"
_STRANGERS: Final = 1024
_SHOW_KEY_SECONDS: Final = 10.0
_BODY_SECONDS: Final = 60.0
_KEEP_SECONDS: Final = 75.0
_SPARE_FILES: Final = 128
_ITERATIONS: Final = 10
_ITERATION_SECONDS: Final = 0.005
_RETRY: Final = "x-stainless-retry-count"


class CallHandler(Protocol):
    """Whoever a key belongs to."""

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        """Take a call, or find it again: `retry` if the client states that it asks again."""


class Gateway:
    """Listens from `start` on, until `close`."""

    def __init__(self, sampling: SamplingConfig) -> None:
        self._sampling = sampling
        self._owners: dict[str, CallHandler] = {}
        self._connections: dict[_Connection, None] = {}
        self._strangers: dict[_Connection, None] = {}
        self._listening: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._began = int(time.time())
        self._most = 0
        self.url = ""

    async def start(self, bound: socket.socket | None = None) -> str:
        """The base URL; begins to listen if it does not, with a `bound` socket or at any port.

        Raises OSError.
        """
        async with self._starting:
            if self._listening is None:
                self._most = _most_files() - _SPARE_FILES
                server = _Server(self)
                loop = asyncio.get_running_loop()
                bound = bound or socket.create_server((LOOPBACK, 0))
                self._listening = await loop.create_server(server, sock=bound, backlog=4096)
                port = bound.getsockname()[1]
                self.url = f"http://{LOOPBACK}:{port}/v1"
        return self.url

    def open(self, owner: CallHandler) -> str:
        """A key for this owner's calls."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._owners[key] = owner
        return key

    def end(self, key: str) -> None:
        """Take a key back: calls with it get 401 from now on."""
        self._owners.pop(key, None)

    async def close(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            self._listening.close()
            for connection in list(self._connections):
                connection.drop()

    # ------------------------------------------------------------ connections

    def connected(self, connection: "_Connection") -> None:
        """A connection is there; it is a stranger's until it shows a key."""
        self._connections[connection] = self._strangers[connection] = None
        if len(self._strangers) > _STRANGERS:
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]  # its end comes later, and a thousand may come before it
            oldest.drop()
        if len(self._connections) > self._most:
            connection.drop()
        asyncio.get_running_loop().call_later(
            _SHOW_KEY_SECONDS, self._drop_unauthenticated, connection
        )

    def _drop_unauthenticated(self, connection: "_Connection") -> None:
        if connection in self._strangers:
            connection.drop()

    def disconnected(self, connection: "_Connection") -> None:
        """A connection has ended."""
        self._connections.pop(connection, None)
        self._strangers.pop(connection, None)

    # ------------------------------------------------------------ calls

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Reply to one request."""
        _connection(request).answered = None  # the client goes on: it has what was sent before
        try:
            owner = self._owner(request)
            match request.method, request.path:
                case "GET", "/v1/models":
                    return _json(models(self._began, MODEL))
                case "GET", path if path.startswith(_ONE_MODEL):
                    return _json(self._model(path.removeprefix(_ONE_MODEL)))
                case "POST", "/v1/chat/completions":
                    return await self._chat(request, owner)
            raise CallRefused(
                f"there is no {request.method} {request.path!r:.100}; there are POST "
                "/v1/chat/completions, GET /v1/models and GET /v1/models/{model}",
                status=404,
            )
        except CallRefused as refused:
            return _json(refused.body(), refused.status)

    def _model(self, name: str) -> dict[str, Any]:
        """Return the body that describes a model. Raises CallRefused for an unknown one."""
        if name != MODEL:
            raise CallRefused(
                f"the model {name!r:.100} does not exist; the only one is {MODEL!r}",
                "model",
                status=404,
                code="model_not_found",
            )
        return model(self._began, name)

    def _owner(self, request: web.BaseRequest) -> CallHandler:
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        owner = self._owners.get(key.strip())
        if owner is None:
            raise CallRefused(
                "the key belongs to no agent that runs now; use the one given with this address",
                status=401,
            )
        self._strangers.pop(request.protocol, None)  # type: ignore[call-overload]
        return owner

    async def _chat(self, request: web.BaseRequest, owner: CallHandler) -> web.StreamResponse:
        asked = checked_call(await _body(request), self._sampling)
        connection = _connection(request)
        retry = request.headers.get(_RETRY, "0") != "0"
        for _ in range(_ITERATIONS if retry else 0):
            # The client has closed the connection of its first try, and the event loop may not
            # have come to that. Without it, which of several equal calls was left is unknown.
            await asyncio.sleep(_ITERATION_SECONDS)
        call = owner.call(asked, retry=retry)
        call.clients += 1
        try:
            answer = await asyncio.shield(call.answer)
            call.given = True  # before it is sent: the client may be quicker than this
            try:
                if connection.has_left():
                    raise asyncio.CancelledError  # as the end of the connection does a moment later
                reply = self._reply(asked, answer)
                await reply.prepare(request)
                if not asked.stream:
                    await reply.write_eof()
            except (OSError, asyncio.CancelledError):
                call.given = False
                raise
            if asked.stream:
                await self._stream(reply, asked, answer)
            call.kept = True
            connection.answered, connection.streamed = call, asked.stream
            return reply
        finally:
            call.clients -= 1

    def _reply(self, asked: ChatCall, answer: ChatAnswer) -> web.StreamResponse:
        if asked.stream:
            kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            return web.StreamResponse(headers=kind)
        return _json(answer.completion(asked.model, self._began))

    async def _stream(self, reply: web.StreamResponse, asked: ChatCall, answer: ChatAnswer) -> None:
        """Send the answer, which is complete, as events; one event is enough to have it."""
        for chunk in answer.chunks(asked.model, self._began, with_usage=asked.with_usage):
            await reply.write(b"data: " + json_text(chunk).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        await reply.write_eof()


class _Connection(web.RequestHandler):
    """A connection; aiohttp limits neither their number nor the time of headers."""

    def __init__(self, gateway: Gateway, server: web.Server) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=_KEEP_SECONDS,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            lingering_time=0.0,
        )
        self._gateway = gateway
        self.answered: Call | None = None  # the call of the last request, once its answer was sent
        self.streamed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._gateway.connected(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._gateway.disconnected(self)
        if self.answered is not None and isinstance(exc, ConnectionError):
            # The client closed it with bytes unread. Of a stream, one event is enough to have it.
            self.answered.kept = False
            self.answered.given = self.streamed

    def has_left(self) -> bool:
        """Return whether the client has closed it, also before the event loop has seen that."""
        if self.transport is None or self.transport.is_closing():
            return True
        ends = select.poll()
        ends.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(ends.poll(0))

    def drop(self) -> None:
        """End it at once."""
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()


def _connection(request: web.BaseRequest) -> _Connection:
    assert isinstance(request.protocol, _Connection)
    return request.protocol


class _Server(web.Server):
    """Makes connections of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        loop = asyncio.get_running_loop()

        def request_of(
            message: Any, payload: Any, protocol: Any, writer: Any, task: Any
        ) -> web.BaseRequest:
            parts = (message, payload, protocol, writer, task)
            return web.BaseRequest(*parts, loop, client_max_size=LARGEST_BODY)

        super().__init__(gateway.handle, request_factory=request_of, handler_cancellation=True)
        self._gateway = gateway

    def __call__(self) -> web.RequestHandler:
        return _Connection(self._gateway, self)


async def _body(request: web.BaseRequest) -> Any:
    """The JSON that a request holds. Raises CallRefused."""
    if (request.content_length or 0) > LARGEST_BODY:
        raise CallRefused(f"the body has more than {LARGEST_BODY:,} bytes", status=413)
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            waits = request.headers.get("Expect", "").lower() == "100-continue"
            if waits and request.version >= HttpVersion11:
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                request.writer.output_size = 0  # else aiohttp takes these for bytes of the reply
            return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise CallRefused(f"the body has more than {LARGEST_BODY:,} bytes", status=413) from error
    except TimeoutError as error:
        raise CallRefused(
            f"the body did not come within {_BODY_SECONDS:g} s", status=408
        ) from error
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the body is no JSON: {error}") from error


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    return web.Response(
        body=json_text(body).encode(), status=status, content_type="application/json"
    )


def _most_files() -> int:
    """Files that this process may open, as many as it is allowed to."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
