"""Interface of an engine for the rollout driver, and the messages between them.

Invariants
- An engine reports every token exactly once, in order, with its log-prob (behavior policy, at the
  sampling temperature) and the policy version that made it.
- A `generate` stream ends with exactly one chunk whose `end` is set, or raises `EngineError`:
  `RequestRefused` when the request is at fault, which is then never worth a repetition.
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
    """An engine did not answer as it should; names the engine, the call and the answer."""


class RequestRefused(EngineError):
    """An engine takes this request for invalid (too long, a bad setting), as any engine would.

    That is evidence about the request and none about the engine.
    """


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """Continue `input_ids` (prompt and earlier response tokens) by at most `max_new_tokens`.

    `urgent`: before all that wait in the engine's queue.
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
    """New tokens of one request, all of one version; the last chunk carries `end`.

    `queued_seconds`, of the first: how long the engine let the request wait; 0 where it is unknown.
    `columns`: what else the engine reports, the same of all its tokens (`trajectory/columns.py`).
    """

    token_ids: IntArray
    logprobs: FloatArray
    version: PolicyVersion
    end: StreamEnd | None = None
    queued_seconds: float = 0.0
    columns: Arrays = ()


@dataclass(frozen=True)
class EngineStatus:
    """A load report of one engine."""

    running_requests: int
    queued_requests: int
    kv_usage: float
    preemptions_total: int


class EngineClient(Protocol):
    """An engine. Every method but `generate` has a time limit and raises `EngineError`.

    How long a stream may be silent depends on what its engine is doing, which the driver sees
    (rollout/tracked_engine.py); how long it may last has no limit.
    """

    @property
    def engine_id(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def kv_capacity_tokens(self) -> int: ...

    @property
    def max_sequence_tokens(self) -> int | None:
        """Prompt and response together that it takes; None when that is not known."""

    @property
    def dtype(self) -> str | None:
        """The type in which it computes, as torch calls it; None when that is not known."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream a response. Canceling or closing the iteration aborts the request."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; each stream ends with a chunk of `end="abort"`."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def flush_cache(self) -> None: ...

    async def release_memory(self, *, keep_weights: bool = False) -> None:
        """Give the device memory of KV cache and weights back; the engine is paused or idle."""

    async def resume_memory(self, *, weights_only: bool) -> None:
        """Take memory again: for the weights, then for all that is still missing."""

    async def version(self) -> PolicyVersion:
        """The version that the engine reports."""

    async def checksum(self) -> str:
        """Return a checksum over all weights that the engine really holds (all TP ranks)."""

    async def status(self) -> EngineStatus: ...

    async def close(self) -> None:
        """Release connections (not the server)."""


class _OfClient:
    """An attribute or a method of the client that a forwarding client has."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, forwarding: "ForwardingClient", owner: type) -> Any:
        return getattr(forwarding._client, self._name)


class ForwardingClient:
    """Hands every call on to `client`: the base of clients that add something."""

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
