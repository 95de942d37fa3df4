"""Responses of the policy: what is wanted, one request toward it, and requests to its end.

Every token of a response comes through `read`, whether it is trained, evaluated or taught: training
makes one request at a time, as the scheduler submits them; `respond` makes as many as it takes.

Invariants
- A request asks for what its response lacks: its input is the prompt and every token so far, its
  limit what is left (`Wanted.request`).
- What ends a response can be seen by its tokens (`Wanted.end`). An engine reports it with the last
  one, but the report is lost when the request is cut off just then, and a request for what follows
  would be answered with tokens behind the end.
- A chunk is taken before the next one is read, and a stream is closed when `read` returns: the
  response may go on elsewhere at once.
- At most `slots` requests run on an engine of `EnginePool` at once, and none between the end of
  `hold` and `release`: weights never change under one. Responses that have begun go first.
- An engine that fails costs no response before `_TRIES` failures of that response.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import (
    EngineClient,
    EngineError,
    GenerationRequest,
    RequestRefused,
    StreamEnd,
    TokenChunk,
)
from megatron_async.trajectory.types import FinishReason, IntArray, PolicyVersion

IN_FLIGHT_PER_ENGINE = 128
_TRIES = 3
_POLL_SECONDS = 0.01
_END_SECONDS = 30.0


@dataclass(frozen=True)
class ResponseSpec:
    """Sampling and end of a response that is asked for.

    `exact`: it has just `limit` tokens, whatever the model would end at.
    """

    sampling: SamplingConfig
    limit: int
    stop_token_ids: tuple[int, ...] = ()
    exact: bool = False

    def end(self, length: int, last: int | None) -> FinishReason | None:
        """Return why a response of `length` tokens is complete; None: it can go on.

        `last` is its last token if the policy made it.
        """
        if last in self.stop_token_ids and not self.exact:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.limit else None

    def request(
        self, name: str, prompt_ids: IntArray, *response_ids: IntArray | Sequence[int]
    ) -> GenerationRequest:
        """Return the request for what follows the parts of a response that are there."""
        input_ids = np.concatenate([prompt_ids, *response_ids]).astype(np.int32)
        left = self.limit - (len(input_ids) - len(prompt_ids))
        return GenerationRequest(
            name, input_ids, left, self.sampling, self.stop_token_ids, ignore_eos=self.exact
        )


async def read(
    engine: EngineClient,
    request: GenerationRequest,
    take: Callable[[TokenChunk], Awaitable[bool]],
) -> StreamEnd | None:
    """Read a request's stream; `take` gets each chunk, and returns whether to go on.

    Returns how the stream ended; None where `take` wanted no more before. Raises EngineError.
    """
    end = None
    async with aclosing(engine.generate(request)) as chunks:
        async for chunk in chunks:
            goes_on = await take(chunk)
            end = chunk.end or end
            if not goes_on:
                break
    return end


@dataclass
class ResponseTokens:
    """Tokens of a response so far, how many of them each version made, and its end."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    end: FinishReason | None = None

    async def take(self, chunk: TokenChunk) -> bool:
        """Add a chunk."""
        if len(chunk.token_ids):
            self.token_ids += chunk.token_ids.tolist()
            self.logprobs += chunk.logprobs.tolist()
            self.versions[chunk.version] += len(chunk.token_ids)
        if chunk.end is not None and chunk.end != "abort":
            self.end = FinishReason(chunk.end)
        return True


async def respond(
    wanted: ResponseSpec, prompt_ids: IntArray, name: str, engines: "EnginePool"
) -> ResponseTokens | None:
    """Generate a whole response, by as many requests as it takes; None: engines refuse the prompt.

    `name` is unique among the responses under way. Raises EngineError.
    """
    response, requests, failures = ResponseTokens(), 0, 0
    while response.end is None:
        # The terminator keeps any name from being a prefix of another.
        request = wanted.request(f"{name}.{requests};", prompt_ids, response.token_ids)
        try:
            async with engines.turn(request.request_id, resumes=requests > 0) as engine:
                ended = await read(engine, request, response.take)
                if ended == "abort" and not engines.held:
                    raise EngineError(f"engine {engine.engine_id} aborted request {name}")
        except RequestRefused:
            return None
        except EngineError as error:
            failures += 1
            await engines.failed(engine, error)
            if failures == _TRIES:
                raise
        requests += 1
        last = response.token_ids[-1] if response.token_ids else None
        response.end = response.end or wanted.end(len(response.token_ids), last)
    return response


class EnginePool:
    """Engines, whichever serve just then, that generate responses beside those of the rollouts."""

    def __init__(
        self,
        serving: Callable[[], Sequence[EngineClient]],
        slots: int = IN_FLIGHT_PER_ENGINE,
        failed: Callable[[EngineClient, EngineError], Awaitable[None]] | None = None,
    ) -> None:
        """`serving`: those that may be asked now; `failed` is called with one that has failed."""
        self.slots = slots
        self._serving = serving
        self._when_failed = failed
        self._load: Counter[str] = Counter()
        self._running: dict[str, tuple[EngineClient, asyncio.Timeout]] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._queue = asyncio.Lock()
        self._resuming = 0

    @property
    def held(self) -> bool:
        """Return whether requests are ended, and none begins."""
        return not self._open.is_set()

    async def failed(self, engine: EngineClient, error: EngineError) -> None:
        """Report an engine on which a request has failed."""
        if self._when_failed is not None:
            await self._when_failed(engine, error)

    async def suspend(self) -> None:
        """Returns when no request runs. One that an engine does not end is read no further."""
        self._open.clear()
        running = list(self._running.items())
        end = asyncio.get_running_loop().time() + _END_SECONDS
        for _, (_, limit) in running:
            limit.reschedule(end)
        for engine in {engine for _, (engine, _) in running}:
            try:
                await engine.abort([name for name, (its, _) in running if its is engine])
            except EngineError:
                continue  # its streams report it
        while self._running:
            await asyncio.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Let requests run again."""
        self._open.set()

    @asynccontextmanager
    async def turn(self, name: str, *, resumes: bool) -> AsyncIterator[EngineClient]:
        """An engine with a free slot, for the request of this name. Raises EngineError."""
        engine = await self._free(resumes=resumes)
        try:
            async with asyncio.timeout(None) as limit:
                self._running[name] = engine, limit
                yield engine
        except TimeoutError as error:
            raise EngineError(f"engine {engine.engine_id} did not end request {name}") from error
        finally:
            self._running.pop(name, None)
            self._load[engine.engine_id] -= 1

    async def _free(self, *, resumes: bool) -> EngineClient:
        """Wait for the emptiest engine. One new response looks for it, others queue."""
        self._resuming += resumes
        try:
            async with nullcontext() if resumes else self._queue:
                while True:
                    await self._open.wait()
                    free = [e for e in self._serving() if self._load[e.engine_id] < self.slots]
                    # It may be held again since the wait ended.
                    if free and not self.held and (resumes or not self._resuming):
                        engine = min(free, key=lambda e: self._load[e.engine_id])
                        self._load[engine.engine_id] += 1
                        return engine
                    await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._resuming -= resumes
