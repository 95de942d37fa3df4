"""Samples tokens from an engine to verify its weights after an update.

After an update each engine continues a few prompts of the task, through the same endpoint and with
the same sampling settings as any trajectory. The trainer then computes log-probs of the sampled
tokens. If each token's probability according to the trainer, divided by its probability according
to the engine, is 1 up to rounding, the engine's weights, sampling and log-probs are all right.

Invariants
- Every engine samples the same number of tokens, even if the model would end its response earlier.
- The requests of a check are processed before all other requests in the engine's queue, so on a
  full engine they start as soon as running requests end.
- The time limit restarts with each chunk of tokens, so an engine that is slow but makes tokens does
  not fail the check.
- A request whose stream breaks off is sent again, because a single broken stream does not show that
  its engine is at fault.
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
# Number of tokens that each engine samples for one check, in total. With `PROMPTS` prompts, a dozen
# tokens of each prompt take only a few decoding steps, and their mean error suffices to detect
# wrong weights.
TOKENS = 48
_PROMPT_TOKENS = 256
_ANY_TOKEN = np.zeros(1, np.int32)
_TRIES = 3


@dataclass(frozen=True, eq=False)
class ProbeSample:
    """Tokens with which one engine continued one prompt of a weight check, and the engine's
    log-probs of these tokens."""

    engine_id: str
    prompt_ids: IntArray
    token_ids: IntArray
    logprobs: FloatArray


def probe_prompts(prompts: Sequence[IntArray]) -> list[IntArray]:
    """Make the prompts of a weight check: cut each prompt to its first 256 tokens, and replace an
    empty prompt by one arbitrary token.

    256 tokens are enough to be realistic and fit into the context of any engine. Prompts of
    episodes are empty: their tokens come from the environment, which is not started for a check.
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
    """Have an engine continue the prompts, all by the same number of tokens; return the
    continuations.

    The number is `tokens` divided by the number of prompts, rounded up. A prompt that the engine
    refuses as invalid is left out, because a refusal does not show that the engine is broken. The
    continuations may then have fewer than `tokens` tokens in total.

    Raises:
        EngineError: The engine makes no token for `timeout_seconds`, refuses every prompt, fails
            three times on one prompt, ends a continuation early, or generates with another version
            than `version`.
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
            found = await asyncio.gather(
                *(_continue_prompt(engine, r, version, limit) for r in requests)
            )
    except TimeoutError as error:
        silent = f"generated nothing for {timeout_seconds:g} s in the check of {version}"
        raise EngineError(f"engine {engine.engine_id} {silent}") from error
    samples = [one for one in found if isinstance(one, ProbeSample)]
    if not samples:
        raise EngineError(
            f"engine {engine.engine_id} refuses every prompt of its check: {found[0]}"
        )
    return samples


async def _continue_prompt(
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
    """Pack the engines' samples of a weight check, one sequence each and in order, into a batch for
    which the trainer can compute log-probs."""
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
    """Compare the engines' log-probs of their sampled tokens with the trainer's; return the mean
    and largest difference by engine id.

    Args:
        logprobs_T: Trainer's log-probs of the batch from `packed(samples)`, [T].
    """
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
