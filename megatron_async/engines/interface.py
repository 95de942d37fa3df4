"""Defines the interface of an engine for the rollout driver, and the messages between them.

Invariants
- An engine reports every token exactly once and in order, with its log-prob (of the behavior
  policy, at the sampling temperature) and the policy version that generated it.
- A `generate` stream ends with exactly one chunk that has `end` set, or raises `EngineError`. It
  raises `RequestRefused` if the request itself is invalid; repeating such a request is useless.
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
    """An engine did not reply as it should; the message names the engine, the call and the
    reply."""


class RequestRefused(EngineError):
    """An engine rejects a request as invalid (too long, a bad setting), as every engine would.

    This counts against the request, not against the engine.
    """


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """Request to continue `input_ids` (prompt and earlier response tokens) by at most
    `max_new_tokens`.

    Attributes:
        ignore_eos: Whether stop tokens do not end the response, so that it has exactly
            `max_new_tokens`.
        urgent: Whether the request runs before all others that wait in the engine's queue.
    """

    request_id: str
    input_ids: IntArray
    max_new_tokens: int
    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    urgent: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class TokenChunk:
    """New tokens of one request, all of one policy version.

    Attributes:
        end: How the stream has ended; set in the last chunk only.
        queued_seconds: In the first chunk, how long the request has waited in the engine's queue; 0
            if unknown.
        columns: Further arrays that the engine reports for the tokens (`trajectory/columns.py`).
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
        kv_usage: Share of the KV cache in use.
        preemptions_total: Number of preempted requests since the engine's start.
    """

    running_requests: int
    queued_requests: int
    kv_usage: float
    preemptions_total: int


class EngineClient(Protocol):
    """Client of one engine. Every method except `generate` has a time limit and raises
    `EngineError`.

    How long a stream may be silent depends on what its engine is doing, which the driver knows
    (rollout/tracked_engine.py). A stream may last for any time.
    """

    @property
    def engine_id(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def kv_capacity_tokens(self) -> int: ...

    @property
    def max_sequence_tokens(self) -> int | None:
        """Largest number of tokens of prompt and response together; None if unknown."""

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
        """Allocate released memory again: only that of the weights if `weights_only`, otherwise all
        of it."""

    async def version(self) -> PolicyVersion:
        """Return the policy version that the engine reports."""

    async def checksum(self) -> str:
        """Return a checksum over all weights that the engine has loaded, on all its ranks."""

    async def status(self) -> EngineStatus: ...

    async def close(self) -> None:
        """Close the client's connections; the server continues."""


class _OfClient:
    """Descriptor that forwards an attribute or method to the wrapped client."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, forwarding: "ForwardingClient", owner: type) -> Any:
        return getattr(forwarding._client, self._name)


class ForwardingClient:
    """Forwards every call to `client`; base class of clients that add something."""

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
