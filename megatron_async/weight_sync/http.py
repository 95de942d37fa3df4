"""Makes blocking HTTP calls to inference engines, for the trainer ranks that send weights.

Invariants
- Every call has a time limit. If an engine refuses the connection, replies with another status than
  200, or is too slow, the call raises an `EngineCallError` that names engine, call and reply.
- Calls to several engines run in parallel. The failure of one engine does not hide others.
- A time limit counts only time in which this process was running. If the process is stopped for a
  while (for instance by SIGSTOP) and a reply arrives meanwhile, the call succeeds.
"""

import http.client
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from megatron_async.errors import ComponentFailure
from megatron_async.runtime.time_limits import STEP_SECONDS, AwakeDeadline

MAX_BYTES = 16 << 20
"""Largest accepted size of a reply, in bytes.

The largest valid reply has about 1.5 MB: checksums of 10,000 parameters, at 150 bytes each.
"""
_ANSWER_CHARACTERS = 500
T = TypeVar("T")


@dataclass(frozen=True)
class EngineAddress:
    """Name and URL of an engine. A restarted engine has a new name: `engine3.1` is the engine with
    index 3 after its first restart."""

    engine_id: str
    url: str

    @property
    def index(self) -> int:
        return int(self.engine_id.removeprefix("engine").partition(".")[0])


class EngineCallError(ComponentFailure):
    """Error of one or more calls to engines that failed.

    Attributes:
        engine_ids: The engines whose calls have failed.
        status: HTTP status of the reply, if the error belongs to a single call with a reply;
            otherwise None.
    """

    def __init__(self, message: str, engine_ids: Sequence[str], status: int | None = None) -> None:
        super().__init__(message)
        self.engine_ids = tuple(engine_ids)
        self.status = status


def call(
    engine: EngineAddress,
    method: str,
    path: str,
    body: Mapping[str, Any] | None,
    timeout_seconds: float,
    api_key: str = "",
) -> dict[str, Any]:
    """Call an engine over HTTP; return the JSON object in its reply, or {} if the reply is not a
    JSON object.

    Raises:
        EngineCallError: If the call fails, or the engine replies with another status than 200.
    """
    parts = urlsplit(engine.url)
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    connection = http.client.HTTPConnection(
        parts.hostname or "", parts.port, timeout=max(timeout_seconds, 0.001)
    )
    try:
        connection.connect()
        connection.sock = _PatientSocket(connection.sock, timeout_seconds)
        connection.request(method, f"/{path}", body=data, headers=headers)
        with connection.getresponse() as response:
            status, answer = response.status, response.read(MAX_BYTES + 1)
            if len(answer) > MAX_BYTES:
                raise http.client.HTTPException(f"the reply has more than {MAX_BYTES} bytes")
            # `read` with a limit raises no error if the reply is truncated, so check that no bytes
            # are missing.
            if response.length:
                raise http.client.IncompleteRead(answer, response.length)
    except (OSError, http.client.HTTPException) as error:
        raise EngineCallError(
            f"engine {engine.engine_id} ({engine.url}): {method} /{path} failed within "
            f"{timeout_seconds:.1f} s: {error or type(error).__name__}",
            [engine.engine_id],
        ) from error
    finally:
        connection.close()
    if status != http.client.OK:
        text = answer[:_ANSWER_CHARACTERS].decode(errors="replace")
        raise EngineCallError(
            f"engine {engine.engine_id} ({engine.url}): {method} /{path} returned status {status}: "
            f"{text}",
            [engine.engine_id],
            status,
        )
    return json_object(answer)


def json_object(answer: bytes) -> dict[str, Any]:
    """Parse a JSON object; return {} if `answer` is empty or is not a JSON object."""
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


class _PatientSocket(socket.socket):
    """A connected socket that limits the total time of sending and receiving.

    Only time in which the process was running counts.
    """

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        super().__init__(fileno=connected.detach())
        self._deadline = AwakeDeadline(seconds)

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        return self._patiently(partial(super().recv_into, buffer, nbytes, flags))

    def sendall(self, data: Any, flags: int = 0) -> None:
        left = memoryview(data)
        while left:
            left = left[self._patiently(partial(self.send, left, flags)) :]

    def _patiently(self, attempt: Callable[[], T]) -> T:
        while self._deadline.left:
            self.settimeout(min(self._deadline.left, STEP_SECONDS) or STEP_SECONDS)
            try:
                return attempt()
            except TimeoutError:
                continue
            finally:
                self._deadline.tick()
        raise TimeoutError("timed out")


class EngineCalls:
    """Makes parallel calls to a fixed set of engines, on its own threads."""

    def __init__(self, engines: Sequence[EngineAddress], api_key: str = "") -> None:
        self.engines = tuple(engines)
        self._api_key = api_key
        # Up to two calls per engine run at once: a call that does not return, and the call that
        # makes the engine end it.
        self._pool = ThreadPoolExecutor(
            max_workers=max(2 * len(self.engines), 1), thread_name_prefix="engine-calls"
        )

    def start(
        self,
        path: str,
        body_of: Callable[[int], Mapping[str, Any] | None],
        timeout_seconds: float,
        method: str = "POST",
        only: Sequence[int] | None = None,
    ) -> list[Future[dict[str, Any]]]:
        """Start one call to each engine, or only to those whose indices are in `only`.

        `body_of(i)` is the body of the call to the i-th engine.
        """
        places = range(len(self.engines)) if only is None else only
        return [
            self._pool.submit(
                call, self.engines[i], method, path, body_of(i), timeout_seconds, self._api_key
            )
            for i in places
        ]

    def every(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_seconds: float,
        method: str = "POST",
    ) -> list[dict[str, Any]]:
        """Call all engines and wait for their replies.

        Raises:
            EngineCallError: If calls fail; it names all engines that failed.
        """
        return gather(self.start(path, lambda _: body, timeout_seconds, method))

    def close(self) -> None:
        """Release the threads without waiting for running calls, which end at their own time
        limits."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def gather(futures: Sequence[Future[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Wait for all calls; return their replies in order.

    Raises:
        EngineCallError: If calls have failed; the message and `engine_ids` contain all failures.
    """
    for future in futures:
        # Wait for the call, which has its own time limit, without raising its error. The traceback
        # of an error that is raised here would refer to this frame, and the reference cycle would
        # keep the caller's bucket of weights in memory.
        future.exception()
    raise_together(failures_of(futures))
    return [future.result() for future in futures]


def failures_of(futures: Sequence[Future[dict[str, Any]]]) -> list[EngineCallError]:
    """Return the errors of those calls that have ended with an EngineCallError."""
    return [
        error
        for future in futures
        if future.done() and isinstance(error := future.exception(), EngineCallError)
    ]


def raise_together(failures: Sequence[EngineCallError]) -> None:
    """Raise one EngineCallError that contains all `failures`; does nothing if there are none."""
    if failures:
        raise EngineCallError(
            "; ".join(str(failure) for failure in failures),
            [engine_id for failure in failures for engine_id in failure.engine_ids],
        ) from failures[0]


def address_toward(url: str) -> str:
    """Return this machine's IP address on the network interface that reaches `url`. Nothing is
    sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.connect((parts.hostname or "", parts.port or 80))
        return str(opened.getsockname()[0])
