"""Simulates an engine without a server, for fast tests. It generates deterministic tokens at a
speed that settings describe.

It is an `EngineClient` on the event loop that behaves like SGLang as far as the rollout driver can
observe: chunks, versions, aborts, pause modes, a queue, and death at any moment.

Invariants
- A token depends on the seed, the previous token, its position, and the request's stop tokens and
  `ignore_eos`. So a response that was aborted and resumed has the same tokens as one that was not,
  whatever the policy versions are.
- A stop token is the last token of its response, except with `ignore_eos`.
- With `ignore_eos` a response has exactly `max_new_tokens` tokens.
- All running requests advance together, one token per step of `seconds_per_step(running)`.
- A full KV cache moves the newest running requests back to the queue. Only that counts as a
  preemption; a `retract` pause does not, as in SGLang.
- An abort ends a request at once. Only a request that runs while the engine is paused in place ends
  later, when the engine continues.
- After `crash` every call and every stream raises EngineError, until `restart`.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron_async.engines.interface import (
    EngineError,
    EngineStatus,
    GenerationRequest,
    PauseMode,
    RequestRefused,
    StreamEnd,
    TokenChunk,
)
from megatron_async.trajectory.types import PolicyVersion

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class SimulatedEngineModel:
    """Behavior of a simulated engine: its vocabulary, lengths and speed.

    A step takes `step_seconds` plus `seconds_per_request` times the number of running requests.
    Without `ignore_eos`, each token ends the response with probability 1 / `mean_length`. `columns`
    are the dtypes of further values that the engine reports for each token, so that their transport
    can be tested; every byte of such a value equals the lowest byte of the token's id.
    """

    vocab_size: int = 128
    seed: int = 0
    mean_length: int = 64
    step_seconds: float = 0.0
    seconds_per_request: float = 0.0
    stream_interval: int = 16
    max_running_requests: int = 1024
    kv_capacity_tokens: int = 1 << 20
    max_sequence_tokens: int | None = None
    columns: tuple[np.dtype, ...] = ()

    def seconds_per_step(self, running: int) -> float:
        """Return the duration of one decode step with `running` requests, in seconds."""
        return self.step_seconds + self.seconds_per_request * running

    def next_token(self, previous: int, position: int, stops: Collection[int] = ()) -> int:
        """Return the token at `position`, counted from 0 in prompt and response together; it is
        never 0.

        It is not in `stops` if the vocabulary has another token, because a stop token would end the
        response.
        """
        choices = self.vocab_size - 1
        first = self._mix(previous, position) % choices
        tokens = (1 + (first + i) % choices for i in range(choices))
        return next((token for token in tokens if token not in stops), 1 + first)

    def stops(self, previous: int, position: int) -> bool:
        """Return whether the response ends with the token at `position`."""
        return self._mix(previous + self.vocab_size, position) % self.mean_length == 0

    def logprob(self, token: int, position: int) -> float:
        """Return an artificial log-prob in (-2, -1]."""
        return -1.0 - (self._mix(token, position) % 1024) / 1024

    def _mix(self, a: int, b: int) -> int:
        """Return a pseudorandom 64-bit number that depends on the seed, `a` and `b`, by SplitMix64
        (Steele, Lea and Flood 2014)."""
        x = (self.seed * 0x9E3779B97F4A7C15 + a * 0xD1B54A32D192ED03 + b + 1) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return x ^ (x >> 31)


@dataclass(eq=False)
class _Running:
    request: GenerationRequest
    chunks: asyncio.Queue[TokenChunk | EngineError] = field(default_factory=asyncio.Queue)
    length: int = 0
    last_token: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version: PolicyVersion = field(default_factory=lambda: PolicyVersion(0, 0))

    @property
    def position(self) -> int:
        """Index of the next token in the sequence."""
        return len(self.request.input_ids) + self.length


class SimulatedEngine:
    """A simulated engine; all its methods must be called from one event loop."""

    def __init__(
        self,
        engine_id: str = "simulated",
        model: SimulatedEngineModel | None = None,
        version: PolicyVersion = PolicyVersion(0, 0),  # noqa: B008 - an immutable tuple
    ) -> None:
        self.engine_id = engine_id
        self.url = f"simulated://{engine_id}"
        self._model = model = model or SimulatedEngineModel()
        self.kv_capacity_tokens = model.kv_capacity_tokens
        self.max_sequence_tokens = model.max_sequence_tokens
        self.dtype = "float32"
        self._version = version
        self._weights = "initial"
        self._running: dict[str, _Running] = {}
        self._queued: dict[str, _Running] = {}
        self._paused = False
        self._abort_later: list[str] = []
        self._preemptions = 0
        self._crash_reason = ""
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self.tokens_generated = 0

    # ------------------------------------------------------------ control by tests

    def set_weights(self, version: PolicyVersion, weights: str = "") -> None:
        """Use the weights of `version` from the next token on. `weights` is a text that stands for
        their content and determines the checksum."""
        self._require_alive("set_weights")
        for running in [*self._running.values(), *self._queued.values()]:
            self._emit(running, None)
        self._version = version
        self._weights = weights or str(version)

    def crash(self, reason: str = "killed") -> None:
        """Simulate the death of the engine: every stream and every later call raises
        EngineError."""
        self._crash_reason = reason
        for running in self._take_all():
            running.chunks.put_nowait(EngineError(f"{self.engine_id} died: {reason}"))

    def restart(self, version: PolicyVersion) -> None:
        """Restart the engine after a crash, without requests and with the weights of `version`."""
        self._crash_reason, self._paused = "", False
        self._abort_later = []
        self._version, self._weights = version, str(version)

    # ------------------------------------------------------------ EngineClient

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """Stream the response to `request`. Canceling the iteration aborts the request."""
        self._require_alive("generate")
        name, longest = request.request_id, self.max_sequence_tokens
        whole = len(request.input_ids) + request.max_new_tokens
        if not len(request.input_ids):
            raise RequestRefused(
                f"{self.engine_id}: request {name}: the engine rejected it with status 400: "
                "input_ids cannot be empty"
            )
        if longest is not None and whole > longest:
            raise RequestRefused(
                f"{self.engine_id}: request {name}: the engine rejected it with status 400: "
                f"{whole} tokens are more than the engine's limit of {longest}"
            )
        if name in self._running or name in self._queued:
            raise EngineError(f"{self.engine_id}: request {name!r} is already running")
        running = _Running(request, last_token=int(request.input_ids[-1]), version=self._version)
        if request.urgent:
            self._queued = {name: running, **self._queued}
        else:
            self._queued[name] = running
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._decode())
        self._work.set()
        try:
            while True:
                chunk = await running.chunks.get()
                if isinstance(chunk, EngineError):
                    raise chunk
                yield chunk
                if chunk.end is not None:
                    return
        finally:
            for table in (self._running, self._queued):
                if table.get(name) is running:
                    del table[name]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests early; the stream of each ends with a chunk of `end="abort"`.

        A request that runs while the engine is paused in place ends when the engine is resumed.
        """
        self._require_alive("abort")
        if self._paused:
            self._abort_later += [name for name in request_ids if name in self._running]
            request_ids = [name for name in request_ids if name in self._queued]
        for name in request_ids:
            running = self._running.pop(name, None) or self._queued.pop(name, None)
            if running is not None:
                self._emit(running, "abort")

    async def pause(self, mode: PauseMode) -> None:
        self._require_alive("pause")
        self._paused = True
        if mode == "retract":
            self._queued = {**self._running, **self._queued}
            self._running = {}

    async def resume(self) -> None:
        self._require_alive("resume")
        self._paused = False
        later, self._abort_later = self._abort_later, []
        await self.abort(later)
        self._work.set()

    async def flush_cache(self) -> None:
        self._require_alive("flush_cache")

    async def release_memory(self, *, keep_weights: bool = False) -> None:
        """Pretend to release memory; as in SGLang, this is an error while a request is running."""
        self._require_alive("release_memory")
        if self._running:
            raise EngineError(
                f"{self.engine_id}: memory is in use by {len(self._running)} requests"
            )

    async def resume_memory(self, *, weights_only: bool) -> None:
        self._require_alive("resume_memory")

    async def version(self) -> PolicyVersion:
        self._require_alive("version")
        return self._version

    async def checksum(self) -> str:
        self._require_alive("checksum")
        return f"checksum of {self._weights}"

    async def status(self) -> EngineStatus:
        self._require_alive("status")
        return EngineStatus(
            running_requests=len(self._running),
            queued_requests=len(self._queued),
            kv_usage=self._kv_tokens() / self.kv_capacity_tokens,
            preemptions_total=self._preemptions,
        )

    async def close(self) -> None:
        """End the decode task and abort all requests."""
        for running in self._take_all():
            self._emit(running, "abort")
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)

    # ------------------------------------------------------------ decoding

    async def _decode(self) -> None:
        """Run decode steps forever; waits while there is no work."""
        while True:
            if not self._paused:
                self._admit()
            if self._paused or not self._running:
                self._work.clear()
                await self._work.wait()  # This wait has no limit: `close` cancels this task.
                continue
            await asyncio.sleep(self._model.seconds_per_step(len(self._running)))
            if not self._paused:
                self._step()
                self._preempt()

    def _admit(self) -> None:
        for name in list(self._queued):
            full = len(self._running) >= self._model.max_running_requests
            waiting = self._queued[name]
            if full or (self._running and not self._fits(waiting.position)):
                return
            self._running[name] = self._queued.pop(name)

    def _preempt(self) -> None:
        """Move the newest running requests back to the queue until the others fit into the KV
        cache.

        The oldest running request always continues, even if it does not fit.
        """
        while len(self._running) > 1 and not self._fits(0):
            name, newest = self._running.popitem()
            self._queued = {name: newest, **self._queued}
            self._preemptions += 1

    def _step(self) -> None:
        for name, running in list(self._running.items()):
            if name not in self._running:
                continue
            end = self._advance(running)
            if end is not None:
                del self._running[name]
            if end is not None or len(running.token_ids) >= self._model.stream_interval:
                self._emit(running, end)

    def _advance(self, running: _Running) -> StreamEnd | None:
        """Generate the next token of a request; return how the stream ends, or None if it
        continues."""
        request, model = running.request, self._model
        position = running.position
        stops = not request.ignore_eos and model.stops(running.last_token, position)
        stop_tokens = () if request.ignore_eos else request.stop_token_ids
        if stops and stop_tokens:
            token = stop_tokens[0]
        else:
            token = model.next_token(running.last_token, position, stop_tokens)
        running.version = self._version
        running.token_ids.append(token)
        running.logprobs.append(model.logprob(token, position))
        running.last_token = token
        running.length += 1
        self.tokens_generated += 1
        if stops:
            return "stop"
        return "length" if running.length >= request.max_new_tokens else None

    def _emit(self, running: _Running, end: StreamEnd | None) -> None:
        if not running.token_ids and end is None:
            return
        ids, kinds = np.asarray(running.token_ids, dtype=np.int32), self._model.columns
        running.chunks.put_nowait(
            TokenChunk(
                ids,
                np.asarray(running.logprobs, dtype=np.float32),
                running.version,
                end,
                columns=tuple(ids.astype("u1").repeat(k.itemsize).view(k) for k in kinds),
            )
        )
        running.token_ids, running.logprobs = [], []

    def _take_all(self) -> list[_Running]:
        """Remove and return all running and queued requests."""
        taken = [*self._running.values(), *self._queued.values()]
        self._running, self._queued = {}, {}
        return taken

    def _fits(self, more: int) -> bool:
        """Return whether the running requests and `more` further tokens fit into the KV cache."""
        return self._kv_tokens() + more < self.kv_capacity_tokens

    def _kv_tokens(self) -> int:
        return sum(running.position for running in self._running.values())

    def _require_alive(self, what: str) -> None:
        if self._crash_reason:
            raise EngineError(f"{self.engine_id}: {what}: the engine died: {self._crash_reason}")
