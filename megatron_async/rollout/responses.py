"""Generates responses of the policy on the engines that serve at the moment. A response may need
several generation requests, because a request ends early when it is aborted or its engine fails.

Every token of a response passes through `read`, whether it is trained on, evaluated or sampled from
a teacher. In training the scheduler submits one request at a time; `respond` makes as many requests
as a response needs.

Invariants
- A request asks only for what its response lacks: its input is the prompt and every token so far,
  and its limit is the number of tokens that remain (`ResponseSpec.request`).
- Whether a response is complete is decided from its tokens (`ResponseSpec.end`). An engine reports
  the end with the last token, but the report is lost if the request is cut off at that moment.
  Without a look at the tokens, a further request would then add tokens after the end.
- A chunk is processed before the next chunk is read, and a stream is closed when `read` returns. No
  token can arrive after that, so the response may be resumed on another engine at once.
- At most `slots` requests run on one engine of an `EnginePool` at once, and no request runs between
  the return of `suspend` and the call of `release`. Weights therefore never change during a
  request. A request that continues a response gets an engine before a request that starts one.
- If an engine fails, its responses are continued on an engine that still serves. A response is
  given up only after `_TRIES` of its requests have failed.
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
    """Sampling settings of a response and the conditions that end it.

    Attributes:
        limit: Maximum number of tokens.
        stop_token_ids: Tokens that end the response.
        exact: Whether the response gets exactly `limit` tokens, even if the model would end it
            earlier.
    """

    sampling: SamplingConfig
    limit: int
    stop_token_ids: tuple[int, ...] = ()
    exact: bool = False

    def end(self, length: int, last: int | None) -> FinishReason | None:
        """Return why a response of `length` tokens is complete, or None if it is not complete.

        Args:
            last: Last token of the response; None if there is no token yet, or if the token was not
                made by the policy.
        """
        if last in self.stop_token_ids and not self.exact:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.limit else None

    def request(
        self, name: str, prompt_ids: IntArray, *response_ids: IntArray | Sequence[int]
    ) -> GenerationRequest:
        """Return the request that generates the rest of a response, up to the limit, after the
        prompt and the tokens that the response has so far.

        Args:
            name: Id of the request.
            response_ids: Tokens of the response so far, in consecutive pieces.
        """
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
    """Run a generation request on an engine and pass each chunk of tokens to `take`; return how the
    stream ended.

    Args:
        take: Function that processes a chunk and returns whether to continue reading.

    Returns:
        The stream's end; None if `take` stopped the reading before.

    Raises:
        EngineError: The engine failed or refused the request.
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
    """Tokens of a response so far, their log-probs, and why the response ended.

    Attributes:
        versions: Number of tokens that each policy version has made.
        end: Reason why the response is complete; None while it is not.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    end: FinishReason | None = None

    async def take(self, chunk: TokenChunk) -> bool:
        """Append a chunk of tokens to this response and record its end; return True, so that
        reading continues."""
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
    """Generate a complete response to a prompt, with as many requests as needed; return None if
    engines refuse the prompt.

    Args:
        name: Prefix of the request ids, unique among the responses being generated.

    Raises:
        EngineError: Requests of this response failed `_TRIES` times.
    """
    response, requests, failures = ResponseTokens(), 0, 0
    while response.end is None:
        # Engines abort all requests whose id starts with a given id. With the final ";" no request
        # id is a prefix of another.
        request = wanted.request(f"{name}.{requests};", prompt_ids, response.token_ids)
        try:
            async with engines.reserve(request.request_id, resumes=requests > 0) as engine:
                ended = await read(engine, request, response.take)
                if ended == "abort" and not engines.suspended:
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
    """Assigns an engine to each request that is not the scheduler's, for instance of an evaluation.
    Such requests run in addition to the scheduler's requests.

    The pool can be suspended: its requests are then aborted and none is started.

    Attributes:
        slots: Maximum number of requests of this pool on one engine at once.
    """

    def __init__(
        self,
        serving: Callable[[], Sequence[EngineClient]],
        slots: int = IN_FLIGHT_PER_ENGINE,
        failed: Callable[[EngineClient, EngineError], Awaitable[None]] | None = None,
    ) -> None:
        """Create a pool that is not suspended.

        Args:
            serving: Function that returns the engines that may be used now.
            failed: Function that is called with an engine and the error after a request failed on
                it; None to call nothing.
        """
        self.slots = slots
        self._serving = serving
        self._when_failed = failed
        self._load: Counter[str] = Counter()
        self._running: dict[str, tuple[EngineClient, asyncio.Timeout]] = {}
        self._released = asyncio.Event()
        self._released.set()
        self._queue = asyncio.Lock()
        self._resuming = 0

    @property
    def suspended(self) -> bool:
        """Whether this pool is suspended: running requests are aborted and none is started."""
        return not self._released.is_set()

    async def failed(self, engine: EngineClient, error: EngineError) -> None:
        """Report an engine on which a request failed to the function that was passed to the
        constructor."""
        if self._when_failed is not None:
            await self._when_failed(engine, error)

    async def suspend(self) -> None:
        """Abort all running requests of this pool, wait until none runs, and start no request until
        `release` is called.

        A stream that its engine does not end within `_END_SECONDS` is no longer read.
        """
        self._released.clear()
        running = list(self._running.items())
        end = asyncio.get_running_loop().time() + _END_SECONDS
        for _, (_, limit) in running:
            limit.reschedule(end)
        for engine in {engine for _, (engine, _) in running}:
            try:
                await engine.abort([name for name, (its, _) in running if its is engine])
            except EngineError:
                continue  # the streams of this engine raise the error too
        while self._running:
            await asyncio.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Let requests of this pool run again after `suspend`."""
        self._released.set()

    @asynccontextmanager
    async def reserve(self, name: str, *, resumes: bool) -> AsyncIterator[EngineClient]:
        """Wait for an engine with a free slot and reserve the slot for the request `name` during
        this block.

        Args:
            resumes: Whether the request continues a response. Such a request gets an engine before
                requests that start a response.

        Raises:
            EngineError: The pool was suspended and the engine did not end the request in time.
        """
        engine = await self._reserve_slot(resumes=resumes)
        try:
            async with asyncio.timeout(None) as limit:
                self._running[name] = engine, limit
                yield engine
        except TimeoutError as error:
            raise EngineError(f"engine {engine.engine_id} did not end request {name}") from error
        finally:
            self._running.pop(name, None)
            self._load[engine.engine_id] -= 1

    async def _reserve_slot(self, *, resumes: bool) -> EngineClient:
        """Wait for a free slot, reserve it, and return its engine: the engine with the fewest
        requests of this pool.

        Requests that start a response get their engines one after the other, in the order of their
        calls. A request that continues a response does not queue.
        """
        self._resuming += resumes
        try:
            async with nullcontext() if resumes else self._queue:
                while True:
                    await self._released.wait()
                    free = [e for e in self._serving() if self._load[e.engine_id] < self.slots]
                    # The pool may have been suspended again after `_released` was set and before
                    # this task ran.
                    if free and not self.suspended and (resumes or not self._resuming):
                        engine = min(free, key=lambda e: self._load[e.engine_id])
                        self._load[engine.engine_id] += 1
                        return engine
                    await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._resuming -= resumes
