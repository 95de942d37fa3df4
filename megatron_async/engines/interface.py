"""Defines the interface through which the rollout driver uses an engine, and its requests and
replies.

Invariants
- An engine reports every token exactly once and in order. Each token has the policy version that
  generated it and its log-prob under that version at the sampling temperature.
- A `generate` stream ends with exactly one chunk that has `end` set, or raises `EngineError`. It
  raises `RequestRefused` if the request itself is invalid, so that repeating it is useless.
"""

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from megatron_async.config.rollout import SamplingConfig
from megatron_async.trajectory.columns import Arrays
from megatron_async.trajectory.types import FloatArray, IntArray, PolicyVersion

PauseMode = Literal["in_place", "retract"]
StreamEnd = Literal["stop", "length", "abort"]


class EngineError(RuntimeError):
    """Error of a call to an engine that failed or had an unexpected reply. The message names the
    engine, the call and the reply."""


class RequestRefused(EngineError):
    """Error of a request that an engine rejects as invalid, for instance as too long. Every other
    engine would reject it too.

    The engine is not at fault and stays in service.
    """


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """Request to continue `input_ids` (prompt and earlier response tokens) by at most
    `max_new_tokens`.

    Attributes:
        ignore_eos: Whether stop tokens do not end the response, so that it has exactly
            `max_new_tokens`.
        urgent: Whether the request is processed before all other requests that wait in the engine's
            queue.
        together: Number of requests that are sent to the engine at the same time, including this
            one. The engine may wait a moment for the others, to prefill them in the same pass.
    """

    request_id: str
    input_ids: IntArray
    max_new_tokens: int
    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    urgent: bool = False
    together: int = 1


@dataclass(frozen=True, eq=False, slots=True)
class TokenChunk:
    """New tokens of one request, all of one policy version.

    Attributes:
        end: Reason why the stream has ended, set in the last chunk of a stream; otherwise None.
        queued_seconds: In the first chunk, how long the request has waited in the engine's queue; 0
            if unknown.
        columns: Further arrays that the engine reports for the tokens, with one entry for each
            token (`trajectory/columns.py`), for instance the experts to which it was routed.
    """

    token_ids: IntArray
    logprobs: FloatArray
    version: PolicyVersion
    end: StreamEnd | None = None
    queued_seconds: float = 0.0
    columns: Arrays = ()


@dataclass(frozen=True)
class EngineStatus:
    """A load report of one engine.

    Attributes:
        kv_usage: Share of the KV cache in use; 1 means that it is full.
        preemptions_total: Number of preempted requests since the engine's start.
    """

    running_requests: int
    queued_requests: int
    kv_usage: float
    preemptions_total: int


class EngineClient(Protocol):
    """Client of one engine. Every method except `generate` has a time limit and raises
    `EngineError`.

    A stream may last for any time. The client does not limit how long a stream may be silent
    either: an engine that is paused or updated is silent for good reason, which only the driver
    knows (rollout/tracked_engine.py).
    """

    @property
    def engine_id(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def kv_capacity_tokens(self) -> int: ...

    @property
    def max_sequence_tokens(self) -> int | None:
        """Largest number of tokens of prompt and response together that the engine accepts; None if
        unknown."""

    @property
    def dtype(self) -> str | None:
        """Name of the torch dtype in which the engine computes; None if unknown."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the response to `request`. Canceling or closing the iteration aborts the
        request."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests early; the stream of each ends with a chunk of `end="abort"`."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def release_memory(self, *, keep_weights: bool = False) -> None:
        """Release the device memory of the KV cache and, unless `keep_weights`, of the weights.

        The engine must be paused or idle.
        """

    async def resume_memory(self, *, weights_only: bool) -> None:
        """Allocate the released device memory again: with `weights_only` only the memory of the
        weights, otherwise all of it."""

    async def version(self) -> PolicyVersion:
        """Return the policy version that the engine reports."""

    async def checksum(self) -> str:
        """Return a checksum over all weights that the engine has loaded, on all its ranks."""

    async def status(self) -> EngineStatus: ...

    async def close(self) -> None:
        """Close the client's connections; the server continues."""


class _OfClient:
    """Descriptor that reads the attribute or method of the same name from the object's `client`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, forwarding: "ForwardingClient", owner: type) -> Any:
        return getattr(forwarding._client, self._name)


class ForwardingClient:
    """Forwards every attribute and call to `client`; base class of clients that change the behavior
    of some calls."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    engine_id: Any = _OfClient()
    url: Any = _OfClient()
    kv_capacity_tokens: Any = _OfClient()
    max_sequence_tokens: Any = _OfClient()
    dtype: Any = _OfClient()
    generate: Any = _OfClient()
    abort: Any = _OfClient()
    pause: Any = _OfClient()
    resume: Any = _OfClient()
    flush_cache: Any = _OfClient()
    release_memory: Any = _OfClient()
    resume_memory: Any = _OfClient()
    version: Any = _OfClient()
    checksum: Any = _OfClient()
    status: Any = _OfClient()
    close: Any = _OfClient()
