"""Accuracy on held-out problems, measured on an engine.

Invariants
- Problems come from the task's held-out set, in a fixed order; the same call asks the same ones.
- What has no score (it failed, or engines refuse the prompt) counts as wrong; how many is reported.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from megatron_async.config.rollout import SamplingConfig
from megatron_async.config.run import EvalConfig
from megatron_async.engines.interface import (
    EngineClient,
    EngineError,
    GenerationRequest,
    RequestRefused,
    Verifier,
)
from megatron_async.trajectory.types import Prompt

_IN_FLIGHT_PER_ENGINE = 128


@dataclass(frozen=True)
class EvalResult:
    """Held-out accuracy; lengths are response tokens."""

    accuracy: float
    answers: int
    failed_judgements: int
    length_mean: float
    length_median: float
    length_max: int
    truncated_share: float
    seconds: float

    def metrics(self) -> dict[str, float]:
        """The same as `eval/*` scalars."""
        return {f"eval/{name}": float(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class _Answer:
    reward: float | None
    length: int
    truncated: bool


async def evaluate(
    engines: Sequence[EngineClient],
    prompts: Sequence[Prompt],
    verifier: Verifier,
    settings: EvalConfig,
    sampling: SamplingConfig,
    stop_token_ids: Sequence[int],
    tag: str = "eval",
) -> EvalResult:
    """Ask every prompt `settings.samples` times, spread over `engines`.

    Raises EngineError when an engine fails on the way.
    """
    greedy = SamplingConfig(
        temperature=settings.temperature or 1.0,
        top_k=1 if settings.temperature == 0 else -1,
        max_new_tokens=sampling.max_new_tokens,
        allow_biased_behaviour=True,
    )
    gates = {engine.engine_id: asyncio.Semaphore(_IN_FLIGHT_PER_ENGINE) for engine in engines}

    async def ask(number: int, prompt: Prompt, engine: EngineClient) -> _Answer:
        async with gates[engine.engine_id]:
            request = GenerationRequest(
                f"{tag}-{number};",  # no name is a prefix of another
                prompt.token_ids,
                sampling.max_new_tokens,
                greedy,
                tuple(stop_token_ids),
            )
            pieces, end = [], None
            try:
                async for chunk in engine.generate(request):
                    pieces.append(chunk.token_ids)
                    end = chunk.end or end
            except RequestRefused:
                return _Answer(None, 0, False)
        if end == "abort":
            raise EngineError(f"engine {engine.engine_id} aborted evaluation request {number}")
        response = np.concatenate(pieces) if pieces else np.zeros(0, np.int32)
        reward, _ = await verifier.score(prompt, response.tolist())
        return _Answer(reward, len(response), end == "length")

    began = time.monotonic()
    wanted = [prompt for prompt in prompts for _ in range(settings.samples)]
    answers = await asyncio.gather(
        *(
            ask(number, prompt, engine)
            for number, (prompt, engine) in enumerate(
                zip(wanted, itertools.cycle(engines), strict=False)
            )
        )
    )
    lengths = np.array([answer.length for answer in answers])
    return EvalResult(
        accuracy=float(np.mean([answer.reward or 0.0 for answer in answers])),
        answers=len(answers),
        failed_judgements=sum(answer.reward is None for answer in answers),
        length_mean=float(lengths.mean()),
        length_median=float(np.median(lengths)),
        length_max=int(lengths.max()),
        truncated_share=float(np.mean([answer.truncated for answer in answers])),
        seconds=time.monotonic() - began,
    )
