"""Responses to evaluation prompts, from whatever engines serve just then.

Invariants
- At most `slots` requests run on an engine at once, beside those of the rollouts.
- None runs between the end of `hold` and `release`: weights never change under a request, and every
  token is of a version that has been verified. What was generated is kept, and the response goes on
  from it, on any engine and before any new one; each has the versions of its tokens.
- An engine that fails costs no response before `_TRIES` failures of that response.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np

from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import (
    EngineClient,
    EngineError,
    GenerationRequest,
    RequestRefused,
)
from megatron_async.trajectory.types import IntArray, PolicyVersion

IN_FLIGHT_PER_ENGINE = 128
_TRIES = 3
_POLL_SECONDS = 0.01
_END_SECONDS = 30.0


@dataclass(frozen=True)
class Asked:
    """A prompt as it is put to engines; `name` is no prefix of another's."""

    name: str
    prompt_ids: IntArray
    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...]


@dataclass
class EvalResponse:
    """Tokens of a response; by version, how many. `truncated` at the longest length."""

    token_ids: list[int] = field(default_factory=list)
    versions: Counter[PolicyVersion] = field(default_factory=Counter)
    truncated: bool = False

    def complete(self, asked: Asked) -> bool:
        """Return whether nothing follows, by the tokens alone: a request that was cut off behind
        its last token has reported no end."""
        stopped = self.token_ids[-1:] and self.token_ids[-1] in asked.stop_token_ids
        self.truncated = len(self.token_ids) >= asked.sampling.max_new_tokens and not stopped
        return bool(stopped) or self.truncated


class EvaluationEngines:
    """Engines as an evaluation uses them."""

    def __init__(
        self,
        serving: Callable[[], Sequence[EngineClient]],
        slots: int = IN_FLIGHT_PER_ENGINE,
        failed: Callable[[EngineClient, EngineError], Awaitable[None]] | None = None,
    ) -> None:
        """`serving`: those that may be asked now; `failed` is called with one that has failed."""
        self.slots = slots
        self._serving = serving
        self._failed = failed
        self._load: Counter[str] = Counter()
        self._running: dict[str, tuple[EngineClient, asyncio.Timeout]] = {}
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()
        self._resuming = 0

    async def hold(self) -> None:
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

    async def respond(self, asked: Asked) -> EvalResponse | None:
        """The whole response; None when engines refuse the prompt. Raises EngineError."""
        response, failures, requests = EvalResponse(), 0, 0
        while not response.complete(asked):
            engine = await self._take(resumes=requests > 0)
            try:
                ended = await self._read(engine, asked, requests, response)
                if ended:
                    response.truncated = ended == "length"
                    return response
            except RequestRefused:
                return None
            except EngineError as error:
                failures += 1
                if self._failed is not None:
                    await self._failed(engine, error)
                if failures == _TRIES:
                    raise
            finally:
                self._load[engine.engine_id] -= 1
            requests += 1
        return response

    async def _take(self, *, resumes: bool) -> EngineClient:
        """An engine with a free slot, the emptiest. One new response looks for it, others queue."""
        self._resuming += resumes
        try:
            async with nullcontext() if resumes else self._turn:
                while True:
                    await self._open.wait()
                    free = [e for e in self._serving() if self._load[e.engine_id] < self.slots]
                    # It may be held again since the wait ended.
                    if free and self._open.is_set() and (resumes or not self._resuming):
                        engine = min(free, key=lambda e: self._load[e.engine_id])
                        self._load[engine.engine_id] += 1
                        return engine
                    await asyncio.sleep(_POLL_SECONDS)
        finally:
            self._resuming -= resumes

    async def _read(
        self, engine: EngineClient, asked: Asked, number: int, response: EvalResponse
    ) -> str | None:
        """Add what a request brings; its end, None if it was cut off by `hold`."""
        # The terminator keeps any name from being a prefix of another.
        name = f"{asked.name}.{number};"
        ids = np.concatenate([asked.prompt_ids, response.token_ids]).astype(np.int32)
        left = asked.sampling.max_new_tokens - len(response.token_ids)
        request = GenerationRequest(name, ids, left, asked.sampling, asked.stop_token_ids)
        end = None
        try:
            async with asyncio.timeout(None) as limit:
                self._running[name] = engine, limit
                async for chunk in engine.generate(request):
                    if len(chunk.token_ids):
                        response.token_ids += chunk.token_ids.tolist()
                        response.versions[chunk.version] += len(chunk.token_ids)
                    end = chunk.end or end
        except TimeoutError as error:
            raise EngineError(f"engine {engine.engine_id} did not end request {name}") from error
        finally:
            self._running.pop(name, None)
        if end == "abort" and self._open.is_set():
            raise EngineError(f"engine {engine.engine_id} aborted evaluation request {name}")
        return None if end == "abort" else end
