"""Calls an SGLang server over HTTP, as an `EngineClient` with one aiohttp session.

Invariants
- Every call has a time limit and raises `EngineError` with the engine, the call and the reply.
- Every token is returned once, with its log-prob and the version that generated it (stream.py),
  after it was validated (stream_validation.py).
- Request ids that are sent to SGLang are never reused, and none is a prefix of another. SGLang
  aborts every request whose id *starts with* the given one, so aborting "7" would end "71" too. Two
  seconds after the end of a stream, SGLang aborts its id again, which would end a newer request
  with the same id, for instance one that resumes the response.
- An abort of a request that has returned no tokens is repeated until its stream has ended, because
  SGLang forgets an abort that arrives before its request. For a request that has returned tokens,
  one abort to which SGLang has replied is enough.
- A call or request whose connection ends without a reply is repeated once on a new connection: the
  server may just have closed the connection because it was idle.
- The client does not limit how long a stream may be silent (interface.py). If the server's host
  dies, TCP keep-alive ends the connection.
"""

import asyncio
import errno
import itertools
import socket
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    aclosing,
    contextmanager,
    suppress,
)
from pathlib import Path
from typing import Any, Self

import aiohttp
import orjson

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import (
    EngineError,
    EngineStatus,
    GenerationRequest,
    PauseMode,
    RequestRefused,
    TokenChunk,
)
from megatron_async.engines.sglang.burst import priority_of
from megatron_async.engines.sglang.queue import URGENT
from megatron_async.engines.sglang.stream import (
    BadReport,
    Refusal,
    StreamDecoder,
    parse_version,
    refusal_of,
    sampling_params,
)
from megatron_async.engines.stream_validation import StreamValidator, count_of, load_of
from megatron_async.errors import ComponentFailure, one_line
from megatron_async.runtime.time_limits import AwakeTimeout
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import MAX_BYTES, json_object

# This limit is long for a local network, because a server on a loaded machine accepts connections
# slowly.
_CONNECT_SECONDS = 30.0
# Idle connections are closed after this time. It is shorter than the server's limit (5 s), because
# a request is lost if it is sent while the server closes the connection.
_KEEP_ALIVE_SECONDS = 2.0
_FLUSH_SECONDS = 20
_CONTROL_SECONDS = 60.0
_ABORT_AGAIN_SECONDS = 0.5
_ABORT_SELDOM_SECONDS = 2.0
# Calls that are not repeated after a lost connection: if the first call was carried out, SGLang
# would reject the second.
_ONCE = ("release_memory_occupation", "resume_memory_occupation")
_KEPT_LOST = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)
_CONTROL_ERRORS = (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError)
# SGLang's names of its kinds of memory.
_WEIGHTS = "weights"
_CACHES = ("kv_cache", "cuda_graph")
_PREEMPTIONS = b"sglang:num_retracted_requests_total"


class SGLangClient:
    """Client of an SGLang server. Create it with `await SGLangClient.connect(...)`."""

    def __init__(
        self, engine_id: str, url: str, settings: EngineConfig, vocabulary: int | None = None
    ) -> None:
        """Create a client that is not connected.

        Args:
            engine_id: Name of the engine.
            url: URL of the server.
            settings: Settings of the engines.
            vocabulary: Number of tokens in the model's vocabulary, from which on token ids are
                invalid; None if unknown.
        """
        self.engine_id = engine_id
        self._vocabulary = vocabulary
        self.url = url
        self.kv_capacity_tokens = 0
        self.max_sequence_tokens: int | None = None
        """Largest number of tokens of prompt and response together; None if unknown. SGLang reports
        it as the largest input, and the input of a resumed request includes its response so far."""
        self.dtype: str | None = None
        # The dtype that the server must report, or `auto` if any dtype is accepted.
        self._expected_dtype = settings.dtype
        # Time limit of control calls. It is at least the time after which a silent engine counts as
        # hung, so that a slow reply is not an error before that.
        self._control_seconds = max(_CONTROL_SECONDS, settings.hang_timeout_seconds)
        headers = {"Authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
        self._session = _session(headers)
        self._read: set[aiohttp.ClientResponse] = set()
        self._wire_ids: dict[str, str] = {}
        self._answered: set[str] = set()  # Names of running requests that have returned tokens.
        self._unique = uuid.uuid4().hex
        self._serial = itertools.count()
        self._background: set[asyncio.Task[None]] = set()
        # Aborted requests without tokens, whose abort is repeated until they end: the id that was
        # sent to SGLang, by the request's name.
        self._unwanted: dict[str, str] = {}
        self._insisting: asyncio.Task[None] | None = None
        self._released: set[str] = set()

    @classmethod
    async def connect(
        cls, engine_id: str, url: str, settings: EngineConfig, vocabulary: int | None = None
    ) -> Self:
        """Create a client, and read the server's KV capacity, largest request and dtype.

        Raises:
            EngineError: If the server does not reply as expected.
        """
        client = cls(engine_id, url, settings, vocabulary)
        try:
            await client._ask_limits()
        except BaseException:
            await client.close()
            raise
        return client

    async def _ask_limits(self) -> None:
        with self._reading("v1/loads"):
            loads = (await self._get_json("v1/loads"))["loads"]
            self.kv_capacity_tokens = sum(count_of(load["max_total_num_tokens"]) for load in loads)
        with self._reading("server_info"):
            info = await self._get_json("server_info")
            longest = info.get("max_req_input_len")
            self.max_sequence_tokens = None if longest is None else count_of(longest)
            self.dtype = info["dtype"]
            if self._expected_dtype not in ("auto", self.dtype):
                raise ValueError(f"dtype is {self.dtype!r} instead of {self._expected_dtype}")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the response to `request`. Canceling or closing the iteration aborts the
        request."""
        name = request.request_id
        if name in self._wire_ids:
            raise EngineError(f"{self.engine_id}: request {name!r} is already running")
        self._open_session()
        self._wire_ids[name] = self._wire_id(name)
        decoder, ended = StreamDecoder(request, self._wire_ids[name]), False
        validator = StreamValidator(request, self._vocabulary, self.max_sequence_tokens)
        try:
            async with aclosing(self._answer(request)) as parts:
                async for part in parts:
                    decoder.wire_id = self._wire_ids.get(name, decoder.wire_id)
                    for chunk in decoder.chunks(part):
                        if (violation := validator.violation(chunk)) is not None:
                            raise BadReport(f"the engine sent an invalid chunk: {violation}")
                        self._answered.add(name)
                        if chunk.end is not None:
                            ended = True
                            del self._wire_ids[name]
                        yield chunk
        except Refusal as refusal:
            raise RequestRefused(f"{self.engine_id}: request {name}: {refusal}") from refusal
        except (*_CONTROL_ERRORS, BadReport) as error:
            _check_own_limits(error)
            what = f"generation of request {name} failed: {_describe(error)}"
            raise self._failure(what) from error
        finally:
            self._answered.discard(name)
            if not ended:
                self._in_background(self._abort_unread(self._wire_ids.pop(name)))
        if not ended:
            raise self._failure(f"the stream of request {name} broke off")

    def _wire_id(self, name: str) -> str:
        return f"{self._unique}.{next(self._serial)};{name}"

    async def _answer(self, request: GenerationRequest) -> AsyncGenerator[bytes, None]:
        """Send a generation request; yield the bytes of the reply as they arrive.

        If the connection ends without any reply, because the server had closed it as idle, the
        request is sent once more under another id.
        """
        name, session, answered = request.request_id, self._open_session(), False
        async with AsyncExitStack() as opened:
            while not answered:
                body = orjson.dumps(self._body(self._wire_ids[name], request))
                try:
                    async with self._asked(session, "POST", "generate", body) as answer:
                        answered = True
                        self._read.add(answer)
                        opened.callback(self._read.discard, answer)
                        if answer.status != 200:
                            why = (await _text(answer)).decode(errors="replace")
                            raise refusal_of(answer.status, why)
                        async for part in answer.content.iter_any():
                            yield part
                except _KEPT_LOST as error:
                    again = session is self._session and not session.closed
                    if answered or name in self._unwanted or not again or _is_refused(error):
                        raise
                    self._wire_ids[name] = self._wire_id(name)
                    session = await opened.enter_async_context(_session(session.headers))
                except RuntimeError as error:
                    # aiohttp raises RuntimeError when a stream is read whose connection is lost.
                    raise ConnectionError(f"the stream broke off: {error}") from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests early; the stream of each ends with a chunk of `end="abort"`.

        Returns when the abort has reached the engine. Requests that are not running are ignored.
        """
        running = {name: self._wire_ids[name] for name in request_ids if name in self._wire_ids}
        if running:
            self._unwanted |= {n: i for n, i in running.items() if n not in self._answered}
            if self._insisting is None or self._insisting.done():
                self._insisting = self._in_background(self._insist_on_aborts())
            await self._abort_running(running)

    async def pause(self, mode: PauseMode) -> None:
        await self._post("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("continue_generation", {"torch_empty_cache": False})

    async def flush_cache(self) -> None:
        # SGLang flushes its cache only when no request runs, and requests that were aborted a
        # moment ago may not have ended, so let it wait for them.
        await self._post(f"flush_cache?timeout={_FLUSH_SECONDS}", None)

    async def release_memory(self, *, keep_weights: bool = False) -> None:
        # SGLang rejects a second release of the same kind of memory, so leave out released kinds.
        unwanted = _CACHES if keep_weights else (_WEIGHTS, *_CACHES)
        tags = [part for part in unwanted if part not in self._released]
        if tags:
            await self._post("release_memory_occupation", {"tags": tags})
            self._released.update(tags)

    async def resume_memory(self, *, weights_only: bool) -> None:
        # SGLang rejects a request for memory that is not released, so leave out kinds that are not.
        wanted = (_WEIGHTS,) if weights_only else (_WEIGHTS, *_CACHES)
        tags = [part for part in wanted if part in self._released]
        if tags:
            await self._post("resume_memory_occupation", {"tags": tags})
            self._released -= set(tags)

    async def version(self) -> PolicyVersion:
        """Return the policy version that the engine reports."""
        with self._reading("model_info"):
            return parse_version(str((await self._get_json("model_info"))["weight_version"]))

    async def load_from_disk(
        self, model_path: Path, version: PolicyVersion, *, flush_cache: bool = True
    ) -> None:
        """Load the weights of a Hugging Face directory with the same architecture."""
        await self._post(
            "update_weights_from_disk",
            {
                "model_path": str(Path(model_path).absolute()),
                "weight_version": str(version),
                "flush_cache": flush_cache,
            },
        )

    async def checksum(self) -> str:
        """Return a checksum over all weights that the engine has loaded, on all its ranks."""
        with self._reading("weights_checker"):
            answer = await self._post("weights_checker", {"action": "checksum"})
            found = answer["per_engine_checksum"]
            if not isinstance(found, str) or not found:
                raise ValueError(f"the checksum {found!r}")
            return found

    async def status(self) -> EngineStatus:
        with self._reading("load report"):
            loads = (await self._get_json("v1/loads"))["loads"]
            metrics = await self._request("GET", "metrics", None, self._control_seconds)
            return load_of(loads, _counter(metrics, _PREEMPTIONS))

    async def close(self) -> None:
        """Close the client's connections; the server continues."""
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        # Closing an aiohttp session does not wake the tasks that read its replies, so end each
        # reply.
        for answer in self._read:
            answer.content.set_exception(ConnectionError("the client has been closed"))
        await self._session.close()

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session of this client.

        Raises:
            EngineError: The client is closed. A call that starts just after the engine was taken
                out of service thus fails with the same error type as any failed call.
        """
        if self._session.closed:
            raise self._failure("the client has been closed")
        return self._session

    def _failure(self, what: str) -> EngineError:
        return EngineError(f"{self.engine_id} ({self.url}): {what}")

    def _body(self, wire_id: str, request: GenerationRequest) -> dict[str, Any]:
        """Return the body of a generation request in SGLang's format."""
        body = {
            "rid": wire_id,
            "input_ids": request.input_ids.tolist(),
            "sampling_params": sampling_params(request),
            "return_logprob": True,
            "stream": True,
        }
        if request.urgent:
            body["priority"] = URGENT
        elif request.together > 1:
            body["priority"] = priority_of(request.together)
        return body

    async def _abort_running(self, running: Mapping[str, str]) -> None:
        bodies: list[dict[str, Any]] = [{"rid": wire_id} for wire_id in running.values()]
        if len(running) == len(self._wire_ids) > 1:
            # Abort all requests with one call instead of thousands.
            bodies = [{"abort_all": True}]
        await asyncio.gather(*(self._post("abort_request", body) for body in bodies))

    async def _insist_on_aborts(self) -> None:
        """Repeat the aborts of requests in `_unwanted` at growing intervals, until their streams
        have ended."""
        pause = _ABORT_AGAIN_SECONDS
        # If the engine is dead, its streams raise errors themselves, so errors of the aborts are
        # ignored.
        with suppress(EngineError):
            while self._unwanted:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _ABORT_SELDOM_SECONDS)
                running = self._wire_ids
                self._unwanted = {n: i for n, i in self._unwanted.items() if running.get(n) == i}
                if self._unwanted:
                    await self._abort_running(self._unwanted)

    async def _abort_unread(self, wire_id: str) -> None:
        """Abort a request whose stream is no longer read.

        The abort is sent twice, in case the first arrives before the request. Errors are ignored:
        SGLang ends the request itself some seconds after its connection is closed, so a lost abort
        only wastes some computation.
        """
        with suppress(EngineError):
            await self._post("abort_request", {"rid": wire_id})
            await asyncio.sleep(_ABORT_AGAIN_SECONDS)
            await self._post("abort_request", {"rid": wire_id})

    def _in_background(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Convert errors that an unexpected reply causes in this block to EngineError; `what` names
        the reply."""
        try:
            yield
        except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
            raise self._failure(f"its {what} is invalid: {one_line(error)}") from error

    async def _get_json(self, path: str) -> dict[str, Any]:
        return json_object(await self._request("GET", path, None, self._control_seconds))

    async def _post(self, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        return json_object(await self._request("POST", path, body, self._control_seconds))

    async def _request(
        self, method: str, path: str, body: dict[str, Any] | None, seconds: float
    ) -> bytes:
        """Send a call; return the body of the reply.

        Raises:
            EngineError: If the call fails, or the status is not 200.
        """
        data = None if body is None else orjson.dumps(body)
        session = self._open_session()
        try:
            async with AwakeTimeout(seconds):
                try:
                    status, answer = await self._ask(session, method, path, data)
                except _KEPT_LOST as error:
                    # The connection was kept idle, and the server has closed it, for instance
                    # because it was stopped for a while. Repeat the call on a new connection.
                    if path in _ONCE or _is_refused(error):
                        raise
                    async with _session(session.headers) as fresh:
                        status, answer = await self._ask(fresh, method, path, data)
        except _CONTROL_ERRORS as error:
            _check_own_limits(error)
            raise self._failure(f"{method} /{path} failed: {_describe(error)}") from error
        if status != 200:
            text = answer[:500].decode(errors="replace")
            raise self._failure(f"{method} /{path} returned status {status}: {text}")
        return answer

    async def _ask(
        self, session: aiohttp.ClientSession, method: str, path: str, data: bytes | None
    ) -> tuple[int, bytes]:
        async with self._asked(session, method, path, data) as answer:
            return answer.status, await _text(answer)

    def _asked(
        self, session: aiohttp.ClientSession, method: str, path: str, data: bytes | None
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        limit = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        url = f"{self.url}/{path}"
        return session.request(
            method, url, data=data, headers=_JSON, timeout=limit, allow_redirects=False
        )


def _session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """Create a session whose connections end when the server's host is dead."""
    return aiohttp.ClientSession(
        headers=headers,
        cookie_jar=aiohttp.DummyCookieJar(),
        connector=aiohttp.TCPConnector(
            limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS, socket_factory=_kept_alive
        ),
    )


def _is_refused(error: Exception) -> bool:
    """Return whether connecting failed. Then the error is not due to an idle connection that the
    server has closed, and repeating is useless."""
    return isinstance(error, aiohttp.ClientConnectorError)


async def _text(answer: aiohttp.ClientResponse) -> bytes:
    """Read the body of a reply that is not a stream.

    Raises:
        ValueError: If the body is too large.
    """
    found = bytearray()
    async for part in answer.content.iter_any():
        found += part
        if len(found) > MAX_BYTES:
            raise ValueError(f"the reply has more than {MAX_BYTES} bytes")
    return bytes(found)


def _kept_alive(address: tuple[Any, ...]) -> socket.socket:
    """Create a socket with TCP keep-alive, which ends the connection if the other host dies without
    closing it."""
    family, kind, protocol, *_ = address
    opened = socket.socket(family, kind, protocol)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return opened


_JSON = {"Content-Type": "application/json"}


def _counter(metrics: bytes, name: bytes) -> float:
    """Return the sum of a Prometheus counter over its labels; 0 if SGLang has not counted anything
    yet."""
    lines = (line for line in metrics.splitlines() if line.startswith(name))
    return sum(float(line.rsplit(b" ", 1)[1]) for line in lines)


def _check_own_limits(error: BaseException) -> None:
    """Raise a ComponentFailure if `error` shows that this process has no free file descriptors.
    That is not the engine's fault, so it must not become an EngineError."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        raise ComponentFailure(
            f"the client of an engine cannot open more connections ({error}). Raise the limit of "
            "open files (ulimit -n), or lower schedule.concurrency."
        ) from error


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__
