"""Serves the OpenAI chat API over HTTP to agents on this machine.

Invariants
- The server listens only on the loopback address, and writes nothing to a log.
- Every request needs a valid API key, which belongs to one attempt of one agent. A request without
  a key, or with an unknown or revoked one, gets status 401, and the rest of it is not read.
- Connections that have not sent a valid key are limited in number, and closed after a few seconds.
  Thousands of slow or idle connections therefore do not affect agents.
- A call to the policy continues if its client disconnects. The `CallHandler` of its API key decides
  which later request then gets the response.
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
MAX_BODY: Final = 16 << 20
MODEL: Final = "policy"
_ONE_MODEL: Final = "/v1/models/"
_MAX_UNAUTHENTICATED: Final = 1024
_SHOW_KEY_SECONDS: Final = 10.0
_BODY_SECONDS: Final = 60.0
_KEEP_SECONDS: Final = 75.0
_SPARE_FILES: Final = 128
_ITERATIONS: Final = 10
_ITERATION_SECONDS: Final = 0.005
_RETRY: Final = "x-stainless-retry-count"


class CallHandler(Protocol):
    """Interface of the object that handles the calls which use one API key."""

    def call(self, asked: ChatCall, *, retry: bool) -> Call:
        """Return the call that a client's request makes or repeats.

        The client then waits for the call's `answer`.

        Args:
            asked: The client's request.
            retry: Whether the client states that it repeats a request.
        """


class Gateway:
    """HTTP server of the chat API, which listens from `start` until `close`."""

    def __init__(self, sampling: SamplingConfig) -> None:
        """Create a gateway that does not listen yet; `sampling` are the run's settings."""
        self._sampling = sampling
        self._handlers: dict[str, CallHandler] = {}
        self._connections: dict[_Connection, None] = {}
        self._unauthenticated: dict[_Connection, None] = {}
        self._server: asyncio.Server | None = None
        self._starting = asyncio.Lock()
        self._created = int(time.time())
        self._max_connections = 0
        self.url = ""

    async def start(self, bound: socket.socket | None = None) -> str:
        """Start listening, unless the gateway listens already, and return the API's base URL.

        Args:
            bound: Bound socket to listen on; None to listen on any free port.

        Raises:
            OSError: No port could be opened.
        """
        async with self._starting:
            if self._server is None:
                self._max_connections = _raise_file_limit() - _SPARE_FILES
                server = _Server(self)
                loop = asyncio.get_running_loop()
                bound = bound or socket.create_server((LOOPBACK, 0))
                self._server = await loop.create_server(server, sock=bound, backlog=4096)
                port = bound.getsockname()[1]
                self.url = f"http://{LOOPBACK}:{port}/v1"
        return self.url

    def open(self, owner: CallHandler) -> str:
        """Create a new API key, whose calls `owner` handles, and return the key."""
        key = f"sk-{secrets.token_urlsafe(32)}"
        self._handlers[key] = owner
        return key

    def end(self, key: str) -> None:
        """Revoke an API key: new requests with this key get status 401."""
        self._handlers.pop(key, None)

    async def close(self) -> None:
        """Stop listening, and close all connections."""
        if self._server is not None:
            self._server.close()
            for connection in list(self._connections):
                connection.drop()

    # ------------------------------------------------------------ connections

    def connected(self, connection: "_Connection") -> None:
        """Register a new connection, which must send a valid key within `_SHOW_KEY_SECONDS`.

        If too many connections have not sent a key, the oldest of them is closed. The new
        connection is closed if the limit of all connections is exceeded.
        """
        self._connections[connection] = self._unauthenticated[connection] = None
        if len(self._unauthenticated) > _MAX_UNAUTHENTICATED:
            oldest = next(iter(self._unauthenticated))
            # Remove the connection now, because `disconnected` is called later, perhaps only after
            # many more connections.
            del self._unauthenticated[oldest]
            oldest.drop()
        if len(self._connections) > self._max_connections:
            connection.drop()
        asyncio.get_running_loop().call_later(
            _SHOW_KEY_SECONDS, self._drop_unauthenticated, connection
        )

    def _drop_unauthenticated(self, connection: "_Connection") -> None:
        """Close `connection` if it has not sent a valid key."""
        if connection in self._unauthenticated:
            connection.drop()

    def disconnected(self, connection: "_Connection") -> None:
        """Remove a connection that has ended from the gateway's lists."""
        self._connections.pop(connection, None)
        self._unauthenticated.pop(connection, None)

    # ------------------------------------------------------------ calls

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Process one HTTP request of the chat API, and return the reply."""
        # A client that sends another request has received the previous reply.
        _connection(request).answered = None
        try:
            handler = self._handler(request)
            match request.method, request.path:
                case "GET", "/v1/models":
                    return _json(models(self._created, MODEL))
                case "GET", path if path.startswith(_ONE_MODEL):
                    return _json(self._model(path.removeprefix(_ONE_MODEL)))
                case "POST", "/v1/chat/completions":
                    return await self._chat(request, handler)
            raise CallRefused(
                f"this API does not have {request.method} {request.path!r:.100}; it has POST "
                "/v1/chat/completions, GET /v1/models and GET /v1/models/{model}",
                status=404,
            )
        except CallRefused as refused:
            return _json(refused.body(), refused.status)

    def _model(self, name: str) -> dict[str, Any]:
        """Return the JSON body that describes the model `name`.

        Raises:
            CallRefused: `name` is not the name of the policy.
        """
        if name != MODEL:
            raise CallRefused(
                f"the model {name!r:.100} does not exist; the only one is {MODEL!r}",
                "model",
                status=404,
                code="model_not_found",
            )
        return model(self._created, name)

    def _handler(self, request: web.BaseRequest) -> CallHandler:
        """Return the handler of the request's API key, and mark its connection authenticated.

        Raises:
            CallRefused: The request does not have a valid key.
        """
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            key = request.headers.get("x-api-key", "")
        handler = self._handlers.get(key.strip())
        if handler is None:
            raise CallRefused(
                "the key does not belong to an agent that is running; use the key that was "
                "provided with this address",
                status=401,
            )
        self._unauthenticated.pop(request.protocol, None)  # type: ignore[call-overload]
        return handler

    async def _chat(self, request: web.BaseRequest, handler: CallHandler) -> web.StreamResponse:
        """Get the policy's response to a chat request, send it, and return the HTTP reply.

        Fields of the request's `Call` record whether the client received the response.

        Raises:
            CallRefused: The request, or its call to the policy, was refused.
        """
        asked = checked_call(await _body(request), self._sampling)
        connection = _connection(request)
        retry = request.headers.get(_RETRY, "0") != "0"
        for _ in range(_ITERATIONS if retry else 0):
            # Before a retry, the client closed the connection of its first attempt. Let the event
            # loop process that, because it shows which of several equal calls is repeated.
            await asyncio.sleep(_ITERATION_SECONDS)
        call = handler.call(asked, retry=retry)
        call.clients += 1
        try:
            answer = await asyncio.shield(call.answer)
            # Set this before the reply is sent, because the client may send its next request before
            # this coroutine runs again. If sending fails, it is reset below.
            call.received = True
            try:
                if connection.has_left():
                    # Raise what aiohttp will raise here when it notices the closed connection.
                    raise asyncio.CancelledError
                reply = self._reply(asked, answer)
                await reply.prepare(request)
                if not asked.stream:
                    await reply.write_eof()
            except (OSError, asyncio.CancelledError):
                call.received = False
                raise
            if asked.stream:
                await self._stream(reply, asked, answer)
            call.delivered = True
            connection.answered, connection.streamed = call, asked.stream
            return reply
        finally:
            call.clients -= 1

    def _reply(self, asked: ChatCall, answer: ChatAnswer) -> web.StreamResponse:
        """Return an HTTP reply for a response: empty for a stream, or else with the response."""
        if asked.stream:
            kind = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            return web.StreamResponse(headers=kind)
        return _json(answer.completion(asked.model, self._created))

    async def _stream(self, reply: web.StreamResponse, asked: ChatCall, answer: ChatAnswer) -> None:
        """Send a complete response of the policy as a stream of events.

        A client counts as having received the response once one event was sent.
        """
        for chunk in answer.chunks(asked.model, self._created, with_usage=asked.with_usage):
            await reply.write(b"data: " + json_text(chunk).encode() + b"\n\n")
        await reply.write(b"data: [DONE]\n\n")
        await reply.write_eof()


class _Connection(web.RequestHandler):
    """HTTP connection of one client of a `Gateway`, which registers and limits connections.

    aiohttp by itself limits neither the number of connections nor the time for sending headers.

    Attributes:
        answered: Call of the connection's last request, if its reply was sent and no other request
            came since. If the connection is then reset, the client may not have the reply.
        streamed: Whether the reply of that call was a stream.
    """

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
        self.answered: Call | None = None
        self.streamed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._gateway.connected(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._gateway.disconnected(self)
        if self.answered is not None and isinstance(exc, ConnectionError):
            # The client closed the connection before it read the whole reply. A streamed response
            # still counts as received, since events were sent; any other response does not.
            self.answered.delivered = False
            self.answered.received = self.streamed

    def has_left(self) -> bool:
        """Return whether the client has closed the connection.

        A close that the event loop has not processed yet counts too.
        """
        if self.transport is None or self.transport.is_closing():
            return True
        ends = select.poll()
        ends.register(self.transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(ends.poll(0))

    def drop(self) -> None:
        """Close the connection immediately, without sending buffered data."""
        if isinstance(self.transport, asyncio.Transport):
            self.transport.abort()


def _connection(request: web.BaseRequest) -> _Connection:
    assert isinstance(request.protocol, _Connection)
    return request.protocol


class _Server(web.Server):
    """aiohttp server of one gateway, which creates a `_Connection` for each client connection."""

    def __init__(self, gateway: Gateway) -> None:
        loop = asyncio.get_running_loop()

        def request_of(
            message: Any, payload: Any, protocol: Any, writer: Any, task: Any
        ) -> web.BaseRequest:
            parts = (message, payload, protocol, writer, task)
            return web.BaseRequest(*parts, loop, client_max_size=MAX_BODY)

        super().__init__(gateway.handle, request_factory=request_of, handler_cancellation=True)
        self._gateway = gateway

    def __call__(self) -> web.RequestHandler:
        return _Connection(self._gateway, self)


async def _body(request: web.BaseRequest) -> Any:
    """Read the body of a request, and return its parsed JSON.

    Raises:
        CallRefused: The body is too large, did not arrive in time, or is not JSON.
    """
    if (request.content_length or 0) > MAX_BODY:
        raise CallRefused(f"the body has more than {MAX_BODY:,} bytes", status=413)
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            waits = request.headers.get("Expect", "").lower() == "100-continue"
            if waits and request.version >= HttpVersion11:
                await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                # Reset the count of sent bytes, because these are not part of the reply.
                request.writer.output_size = 0
            return json.loads(await request.read())
    except web.HTTPRequestEntityTooLarge as error:
        raise CallRefused(f"the body has more than {MAX_BODY:,} bytes", status=413) from error
    except TimeoutError as error:
        raise CallRefused(
            f"the body did not arrive within {_BODY_SECONDS:g} s", status=408
        ) from error
    except (ValueError, RecursionError) as error:
        raise CallRefused(f"the body is not JSON: {error}") from error


def _json(body: Mapping[str, Any], status: int = 200) -> web.Response:
    """Return an HTTP reply with `body` as JSON."""
    return web.Response(
        body=json_text(body).encode(), status=status, content_type="application/json"
    )


def _raise_file_limit() -> int:
    """Raise this process's limit of open files as far as permitted, and return the new limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
