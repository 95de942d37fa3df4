"""Samples by which an engine is verified: tokens of its own, as the run samples them.

After an update each engine continues a few prompts of the task, by the same endpoint and with the
same sampling settings as any trajectory, and the trainer computes the log-probs of what came. A
ratio of 1 there shows weights, sampling and log-probs at once.

Invariants
- Every engine is asked for the same number of tokens, whatever the model would end at.
- The requests go before those that wait in the engine: a full engine is verified as soon as a
  request leaves it.
- Its limit is one of silence: an engine that is slow, and goes on, is not at fault.
- A stream that breaks off is asked for again: as for any request, one is no evidence about its
  engine.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import (
    EngineClient,
    EngineError,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
)
from megatron_async.runtime.time_limits import AwakeTimeout
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import (
    FloatArray,
    Group,
    IntArray,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
)
from megatron_async.weight_sync.verify import RatioError

PROMPTS = 4
# Tokens that each engine samples for one check, over all prompts. The mean error of a dozen tokens
# of each prompt shows wrong weights, and generation waits for few steps.
TOKENS = 48
_PROMPT_TOKENS = 256
_ANY_TOKEN = np.zeros(1, np.int32)
_TRIES = 3


@dataclass(frozen=True, eq=False)
class ProbeSample:
    """A continuation by one engine, with its log-probs."""

    engine_id: str
    prompt_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray


def probe_prompts(prompts: Sequence[IntArray]) -> list[IntArray]:
    """The beginnings of these prompts: long enough to be real, short enough for any context.

    Of an episode, whose prompt has no tokens before its environment has begun, any token.
    """
    beginnings = (np.asarray(ids[:_PROMPT_TOKENS], dtype=np.int32) for ids in prompts)
    return [ids if len(ids) else _ANY_TOKEN for ids in beginnings]


async def sample(
    engine: EngineClient,
    prompts: Sequence[IntArray],
    sampling: SamplingConfig,
    version: PolicyVersion,
    tokens: int,
    timeout_seconds: float,
) -> list[ProbeSample]:
    """Sample at least `tokens` tokens in all, spread over the prompts.

    Raises EngineError, also when none comes for `timeout_seconds`.

    A prompt that the engine refuses as invalid is left out: that is no evidence about the engine.
    """
    each = -(-tokens // len(prompts))
    requests = [
        GenerationRequest(
            request_id=f"probe-{version}-{number};",
            input_ids=prompt,
            max_new_tokens=each,
            sampling=sampling,
            ignore_eos=True,
            urgent=True,
        )
        for number, prompt in enumerate(prompts)
    ]
    try:
        async with AwakeTimeout(timeout_seconds) as limit:
            found = await asyncio.gather(*(_continued(engine, r, version, limit) for r in requests))
    except TimeoutError as error:
        silent = f"generated nothing for {timeout_seconds:g} s in the check of {version}"
        raise EngineError(f"engine {engine.engine_id} {silent}") from error
    samples = [one for one in found if isinstance(one, ProbeSample)]
    if not samples:
        raise EngineError(
            f"engine {engine.engine_id} refuses every prompt of its check: {found[0]}"
        )
    return samples


async def _continued(
    engine: EngineClient, request: GenerationRequest, version: PolicyVersion, limit: AwakeTimeout
) -> ProbeSample | RequestRefused:
    for tries in range(1, _TRIES + 1):
        tried = replace(request, request_id=f"{request.request_id[:-1]}-{tries};")
        chunks: list[TokenChunk] = []
        try:
            async for chunk in engine.generate(tried):
                limit.restart()
                chunks.append(chunk)
            break
        except RequestRefused as refusal:
            return refusal
        except EngineError:
            if tries == _TRIES:
                raise
    versions = {chunk.version for chunk in chunks if len(chunk.token_ids)}
    if versions != {version}:
        labels = ", ".join(str(other) for other in sorted(versions))
        raise EngineError(
            f"engine {engine.engine_id} generated tokens of versions {labels or 'none'} after the "
            f"update to {version}"
        )
    token_ids = np.concatenate([chunk.token_ids for chunk in chunks])
    if len(token_ids) != request.max_new_tokens:
        raise EngineError(
            f"engine {engine.engine_id} generated {len(token_ids)} of {request.max_new_tokens} "
            f"tokens for the check of {version}"
        )
    logprobs = np.concatenate([chunk.logprobs for chunk in chunks])
    return ProbeSample(engine.engine_id, request.input_ids, token_ids, logprobs)


def packed(samples: Sequence[ProbeSample], temperature: float) -> TokenBatch:
    """Pack a sequence for each sample, in order, for the trainer to compute log-probs."""
    version = PolicyVersion(0, 0)
    trajectories = tuple(
        Trajectory(
            number,
            group_id=0,
            prompt=Prompt(one.prompt_ids, "probe"),
            segments=(Segment(one.token_ids, one.logprobs, version, one.engine_id),),
            reward=0.0,
        )
        for number, one in enumerate(samples)
    )
    group = Group(0, trajectories[0].prompt, trajectories)
    return pack_groups([group], step=0, lineage=0, branch_points={}, temperature=temperature)


def errors(samples: Sequence[ProbeSample], logprobs_T: FloatArray) -> dict[str, RatioError]:
    """Errors by engine; `logprobs_T` are the trainer's of `packed`, [T]."""
    engines: dict[str, list[FloatArray]] = {}
    trainer: dict[str, list[FloatArray]] = {}
    end = 0
    for one in samples:
        start = end + len(one.prompt_ids)
        end = start + len(one.token_ids)
        engines.setdefault(one.engine_id, []).append(one.logprobs)
        trainer.setdefault(one.engine_id, []).append(logprobs_T[start:end])
    return {
        engine_id: RatioError.of(np.concatenate(parts), np.concatenate(trainer[engine_id]))
        for engine_id, parts in engines.items()
    }
