"""Tests the samples that verify an engine: its own tokens, sampled as the run samples, before all
other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import EngineError, GenerationRequest, TokenChunk
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.rollout.probe import ProbeSample, errors, packed, probe_prompts, sample
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, IntArray, PolicyVersion
from megatron_async.weight_sync.verify import EXACT_TOLERANCE, RatioError
from tests.engine import EngineUnderTest, collect, make_request, reference_logprobs, until_streaming
from tests.rollout.stand_ins import MODEL, trainer_logprobs

VERSION = PolicyVersion(5, 2)
PROMPTS = [np.array(ids, np.int32) for ids in ([5, 9, 17, 3], [7], [2, 4, 6], [1, 1])]


def sequences(batch: TokenBatch) -> list[IntArray]:
    return np.split(batch.token_ids_T, batch.cu_seqlens_S1[1:-1])


async def test_samples_have_equal_lengths_and_are_packed_as_sequences() -> None:
    engine = SimulatedEngine("one", MODEL, VERSION)
    samples = await sample(engine, PROMPTS, SamplingConfig(), VERSION, 10, 5.0)
    await engine.close()
    assert [len(one.token_ids) for one in samples] == [3, 3, 3, 3]
    batch = packed(samples, 0.7)
    assert batch.temperature == 0.7
    assert batch.cu_seqlens_S1.tolist() == [0, 7, 11, 17, 22]
    assert batch.prompt_lengths_S.tolist() == [4, 1, 3, 2]
    assert batch.num_trained_tokens == 12
    for number, (one, ids) in enumerate(zip(samples, sequences(batch), strict=True)):
        assert ids.tolist() == [*PROMPTS[number].tolist(), *one.token_ids.tolist()]
    logprobs_T = trainer_logprobs(batch)
    assert (batch.rollout_logprobs_T == logprobs_T).all()
    assert errors(samples, logprobs_T) == {"one": RatioError(0, 0)}


def test_ratio_errors_are_computed_for_each_engine() -> None:
    def one(engine_id: str, logprobs: list[float]) -> ProbeSample:
        ids = np.zeros(len(logprobs), np.int32)
        return ProbeSample(engine_id, np.zeros(2, np.int32), ids, np.array(logprobs, np.float32))

    samples = [one("a", [-1.0]), one("b", [-1.0, -2.0]), one("a", [-3.0])]
    trainer_T = np.array([0, 0, -1, 0, 0, -1, -1, 0, 0, -2], np.float32)
    assert errors(samples, trainer_T) == {"a": RatioError(0.5, 1.0), "b": RatioError(0.5, 1.0)}


def test_probe_prompt_is_cut_when_it_is_long() -> None:
    [cut] = probe_prompts([np.arange(10_000, dtype=np.int32)])
    assert len(cut) == 256 and cut[0] == 0


@pytest.mark.parametrize(
    ("version", "seconds", "why"),
    [
        (PolicyVersion(5, 1), 5.0, r"tokens of versions 5\.1 after the update to 5\.2"),
        (VERSION, 0.05, r"generated nothing for 0\.05 s in the check of 5\.2"),
    ],
)
async def test_sample_fails_when_the_engine_is_silent_or_has_another_version(
    version: PolicyVersion, seconds: float, why: str
) -> None:
    slow = SimulatedEngineModel(step_seconds=0.03)
    engine = SimulatedEngine("one", slow, version)
    with pytest.raises(EngineError, match=f"engine one .*{why}"):
        await sample(engine, PROMPTS, SamplingConfig(), VERSION, 10, seconds)
    assert (await engine.status()).running_requests == 0
    await engine.close()


async def test_sample_waits_when_the_engine_is_slow_but_makes_tokens() -> None:
    """The time limit is a limit on silence: late replies and a busy machine are not the engine's
    fault."""
    slow = SimulatedEngineModel(step_seconds=0.05, stream_interval=1)
    engine = SimulatedEngine("one", slow, VERSION)
    samples = await sample(engine, PROMPTS, SamplingConfig(), VERSION, 120, 0.3)
    assert [len(one.token_ids) for one in samples] == [30] * 4  # The samples take 1.5 s.
    await engine.close()


class Breaking(SimulatedEngine):
    """Simulated engine whose first `broken` streams break off."""

    broken = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        if self.broken:
            self.broken -= 1
            raise EngineError("engine one: the stream broke off")
        async for chunk in super().generate(request):
            yield chunk


@pytest.mark.parametrize(("broken", "fails"), [(2, False), (3, True)])
async def test_sample_retries_when_a_stream_breaks_off(broken: int, fails: bool) -> None:
    """As for a trajectory, one broken stream does not show that its engine is at fault; three in a
    row do."""
    engine = Breaking("one", MODEL, VERSION)
    engine.broken = broken
    sampling = sample(engine, PROMPTS[:1], SamplingConfig(), VERSION, 3, 5.0)
    if fails:
        with pytest.raises(EngineError, match="broke off"):
            await sampling
    else:
        assert [len(one.token_ids) for one in await sampling] == [3]
    await engine.close()


async def test_sample_omits_a_prompt_when_the_engine_refuses_it() -> None:
    engine = SimulatedEngine("one", replace(MODEL, max_sequence_tokens=6), VERSION)
    samples = await sample(engine, PROMPTS, SamplingConfig(), VERSION, 10, 5.0)
    assert [len(one.prompt_ids) for one in samples] == [1, 3, 2], "4 + 3 tokens are too many"
    with pytest.raises(EngineError, match=r"refuses every prompt of its check: .*7 tokens"):
        await sample(engine, PROMPTS[:1], SamplingConfig(), VERSION, 3, 5.0)
    await engine.close()


def _trainer(engine: EngineUnderTest, model: str, batch: TokenBatch, temperature: float) -> Any:
    """Return the log-probs that a trainer with the weights of `model` computes at this
    temperature."""
    values: list[FloatArray] = []
    for ids in sequences(batch):
        found = reference_logprobs(engine.models[model], ids.tolist(), temperature)
        values += [np.zeros(1, np.float32), found]
    return np.concatenate(values)


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_real_engine_samples_have_ratio_one_at_the_temperature_of_the_run(
    sglang_engine: EngineUnderTest, temperature: float
) -> None:
    """With other weights, or with log-probs at another temperature, the ratio is far from 1."""
    engine = sglang_engine
    engine.reset_to("a", VERSION)
    sampling = SamplingConfig(temperature=temperature)
    samples = engine.run(lambda c: sample(c, PROMPTS, sampling, VERSION, 48, 30.0))
    batch = packed(samples, temperature)

    def error(model: str, at: float) -> float:
        return errors(samples, _trainer(engine, model, batch, at))["engine"].mean

    assert error("a", temperature) < EXACT_TOLERANCE / 10
    assert error("a", temperature + 0.4) > 100 * EXACT_TOLERANCE
    assert error("b", temperature) > 1


@pytest.mark.engine
@pytest.mark.slow
def test_probe_requests_precede_queued_requests_when_the_engine_is_full(
    sglang_engine: EngineUnderTest,
) -> None:
    engine = sglang_engine
    engine.reset_to("a", VERSION)
    prompt, long = PROMPTS[0].tolist(), 1900

    async def check(client: SGLangClient) -> list[list[Any]]:
        fillers = client.kv_capacity_tokens // (len(prompt) + long)
        names = [f"r{i}" for i in range(fillers)]
        arrived: list[list[Any]] = [[] for _ in names]
        tasks = [
            asyncio.create_task(collect(client, make_request(name, prompt, long), into))
            for name, into in zip(names, arrived, strict=True)
        ]
        await until_streaming(arrived)
        waiting: list[list[Any]] = [[] for _ in range(4)]
        tasks += [
            asyncio.create_task(collect(client, make_request(f"w{i}", prompt, long), into))
            for i, into in enumerate(waiting)
        ]
        deadline = asyncio.get_running_loop().time() + 20
        while (await client.status()).queued_requests < len(waiting):
            assert asyncio.get_running_loop().time() < deadline, (
                "no request is queued in the engine"
            )
            await asyncio.sleep(0.05)
        await sample(client, PROMPTS, SamplingConfig(), VERSION, 48, 30.0)
        seen = [list(into) for into in waiting]
        await client.abort([*names, *(f"w{i}" for i in range(len(waiting)))])
        await asyncio.gather(*tasks)
        return seen

    assert engine.run(check) == [[], [], [], []], "a queued request ran before the samples"
