"""Tests the SGLang client with a real server on a CPU: tokens, log-probs, versions, aborts and
pauses."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import RequestRefused, TokenChunk
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.trajectory.types import PolicyVersion
from tests.engine import (
    SETTINGS,
    VOCAB,
    EngineUnderTest,
    collect,
    logprobs_of,
    make_request,
    reference_logprobs,
    tokens_of,
    until_streaming,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OLD, NEW = PolicyVersion(3, 7), PolicyVersion(3, 8)
PROMPT = [5, 9, 17, 3]


@pytest.fixture
def engine(sglang_engine: EngineUnderTest) -> EngineUnderTest:
    sglang_engine.reset_to("a", OLD)
    return sglang_engine


async def streaming(
    client: SGLangClient, count: int, length: int
) -> list[asyncio.Task[list[TokenChunk]]]:
    """Start requests r0, r1, ... and wait until tokens of each have arrived; each prompt ends with
    the request's number."""
    arrived: list[list[TokenChunk]] = [[] for _ in range(count)]
    tasks = [
        asyncio.create_task(collect(client, make_request(f"r{i}", [*PROMPT, i], length), into))
        for i, into in enumerate(arrived)
    ]
    await until_streaming(arrived)
    return tasks


def test_client_streams_a_response_in_chunks_with_version_and_end(engine: EngineUnderTest) -> None:
    chunks: list[TokenChunk] = engine.run(lambda c: collect(c, make_request("r", PROMPT, 50)))
    assert len(tokens_of(chunks)) == len(logprobs_of(chunks)) == 50
    assert len(chunks) > 2, "the response arrived in too few chunks"
    assert [chunk.end for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].end == "length"
    assert {chunk.version for chunk in chunks} == {OLD}
    queued, *others = [chunk.queued_seconds for chunk in chunks]
    assert 0 < queued < 5 and not any(others), "only the first chunk has a queue time"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_client_logprobs_equal_the_models_at_the_sampling_temperature(
    engine: EngineUnderTest, temperature: float
) -> None:
    request = make_request("r", PROMPT, 60, sampling=SamplingConfig(temperature=temperature))
    chunks = engine.run(lambda c: collect(c, request))
    ids = [*PROMPT, *tokens_of(chunks).tolist()]
    expected = reference_logprobs(engine.models["a"], ids, temperature)[len(PROMPT) - 1 :]
    assert np.abs(logprobs_of(chunks) - expected).mean() < 1e-4


def test_response_ends_with_its_stop_token(engine: EngineUnderTest) -> None:
    stops = tuple(range(0, VOCAB, 4))
    request = make_request("r", PROMPT, 400, forced=False, stop_token_ids=stops)
    chunks = engine.run(lambda c: collect(c, request))
    tokens = tokens_of(chunks)
    assert chunks[-1].end == "stop"
    assert tokens[-1] in stops
    assert not set(tokens[:-1].tolist()) & set(stops)
    assert len(logprobs_of(chunks)) == len(tokens)


def test_abort_keeps_generated_tokens_and_affects_no_other_request(engine: EngineUnderTest) -> None:
    async def check(client: SGLangClient) -> tuple[list[TokenChunk], list[TokenChunk]]:
        # SGLang aborts all IDs with a prefix; aborting "1" must not abort "11".
        arrived: list[TokenChunk] = []
        one = asyncio.create_task(collect(client, make_request("1", PROMPT, 1500), arrived))
        eleven = asyncio.create_task(collect(client, make_request("11", PROMPT, 150)))
        await until_streaming([arrived])
        await client.abort(["1", "unknown"])
        return await one, await eleven

    aborted, other = engine.run(check)
    assert aborted[-1].end == "abort"
    assert 0 < len(tokens_of(aborted)) < 1500
    ids = [*PROMPT, *tokens_of(aborted).tolist()]
    expected = reference_logprobs(engine.models["a"], ids)[len(PROMPT) - 1 :]
    assert np.abs(logprobs_of(aborted) - expected).mean() < 1e-4
    assert other[-1].end == "length"
    assert len(tokens_of(other)) == 150


def test_abort_ends_a_request_that_arrives_after_it(engine: EngineUnderTest) -> None:
    async def check(client: SGLangClient) -> tuple[float, list[list[TokenChunk]]]:
        names = [f"r{i}" for i in range(8)]
        tasks = [asyncio.create_task(collect(client, make_request(n, PROMPT, 1900))) for n in names]
        await asyncio.sleep(0)  # The requests have not arrived yet.
        started = time.monotonic()
        await client.abort(names)
        return time.monotonic() - started, await asyncio.gather(*tasks)

    seconds, responses = engine.run(check)
    assert {chunks[-1].end for chunks in responses} == {"abort"}
    assert seconds < 5


def test_abort_ends_a_request_that_waits_for_the_end_of_a_pause(
    engine: EngineUnderTest,
) -> None:
    """SGLang drops this abort, and without the project's hook it would ignore every repetition of
    it."""

    async def check(client: SGLangClient) -> list[TokenChunk]:
        await client.pause("in_place")
        task = asyncio.create_task(collect(client, make_request("r", PROMPT, 1900)))
        await asyncio.sleep(0.5)  # The request waits in SGLang's HTTP process.
        await client.abort(["r"])
        await asyncio.sleep(0.5)
        assert not task.done()
        await client.resume()
        return await task

    chunks = engine.run(check)
    assert chunks[-1].end == "abort"
    assert len(tokens_of(chunks)) < 1900


def test_engine_refuses_too_long_requests_and_serves_the_next_request(
    engine: EngineUnderTest,
) -> None:
    """The longest accepted sequence, also when it is resumed before its last token, has the length
    that the settings state."""
    longest = SETTINGS.max_sequence_tokens(2048)
    assert longest is not None

    async def check(client: SGLangClient) -> list[TokenChunk]:
        assert client.max_sequence_tokens == longest
        for prompt, more in ((2048, 1), (longest, 2), (1000, 1049)):
            with pytest.raises(RequestRefused, match="status 400"):
                await collect(client, make_request("long", [5] * prompt, more))
        await collect(client, make_request("whole", [5] * 1990, longest - 1990))
        return await collect(client, make_request("resumed", [5] * (longest - 1), 1))

    assert len(tokens_of(engine.run(check))) == 1


def test_resumed_request_id_is_not_aborted_by_its_predecessors_end(engine: EngineUnderTest) -> None:
    """SGLang aborts a request ID again two seconds after its stream has ended."""

    async def aborted_request(client: SGLangClient) -> list[TokenChunk]:
        [task] = await streaming(client, 1, 1500)
        await client.abort(["r0"])
        return await task

    async def resumed_request(client: SGLangClient) -> list[TokenChunk]:
        await client.pause("in_place")
        task = asyncio.create_task(collect(client, make_request("r0", PROMPT, 40)))
        await asyncio.sleep(2.5)
        await client.resume()
        return await task

    assert engine.run(aborted_request)[-1].end == "abort"
    assert engine.run(resumed_request)[-1].end == "length", (
        "a request of another client was aborted"
    )

    async def both(client: SGLangClient) -> list[TokenChunk]:
        await aborted_request(client)
        return await resumed_request(client)

    assert engine.run(both)[-1].end == "length", "a request of the same client was aborted"


def test_engine_request_ends_when_the_clients_iterator_is_closed(engine: EngineUnderTest) -> None:
    async def check(client: SGLangClient) -> int:
        stream = client.generate(make_request("r", PROMPT, 1900))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        deadline = time.monotonic() + 2.0  # 1,900 tokens would take far longer.
        while (status := await client.status()).running_requests and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return status.running_requests

    assert engine.run(check) == 0


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_engine_generates_no_tokens_while_paused(engine: EngineUnderTest, mode: Any) -> None:
    async def check(client: SGLangClient) -> list[list[TokenChunk]]:
        tasks = await streaming(client, 8, 250)
        await client.pause(mode)
        tasks.append(asyncio.create_task(collect(client, make_request("late", PROMPT, 5))))
        await asyncio.sleep(1.0)
        assert not any(task.done() for task in tasks)
        await client.version()
        await client.resume()
        return await asyncio.gather(*tasks)

    responses = engine.run(check)
    assert [len(tokens_of(chunks)) for chunks in responses] == [250] * 8 + [5]


def test_new_weights_read_the_old_kv_cache_after_an_in_place_update(
    engine: EngineUnderTest,
) -> None:
    async def check(client: SGLangClient) -> list[list[TokenChunk]]:
        tasks = await streaming(client, 8, 150)
        await client.pause("in_place")
        await asyncio.to_thread(engine.load, "b", NEW, False)
        await client.resume()
        return await asyncio.gather(*tasks)

    responses = engine.run(check)
    assert any(len({chunk.version for chunk in chunks}) == 2 for chunks in responses)
    for index, chunks in enumerate(responses):
        prompt = [*PROMPT, index]
        versions = [chunk.version for chunk in chunks for _ in chunk.token_ids]
        assert versions == sorted(versions)
        ids, border = [*prompt, *tokens_of(chunks).tolist()], len(prompt) + versions.count(OLD)
        expected = _kept_cache_logprobs(engine, ids, border)[len(PROMPT) :]
        assert np.abs(logprobs_of(chunks) - expected).max() < 1e-3


def _kept_cache_logprobs(engine: EngineUnderTest, ids: list[int], border: int) -> Any:
    """Return log-probs of the old weights before `border`, then of the new weights with the cache
    that the old weights computed.

    The last token of the old weights was not in the cache yet when the weights changed.
    """
    tokens = torch.tensor([ids])
    with torch.no_grad():
        before = engine.models["a"](tokens[:, : border - 1], use_cache=True)
        after = engine.models["b"](
            tokens[:, border - 1 :], past_key_values=before.past_key_values, use_cache=True
        )
    logits = torch.cat([before.logits[0], after.logits[0]])[:-1].float()
    return torch.log_softmax(logits, -1).gather(1, tokens[0, 1:, None])[:, 0].numpy()


def test_client_reports_version_load_and_capacity(engine: EngineUnderTest) -> None:
    async def check(client: SGLangClient) -> None:
        assert await client.version() == OLD
        assert client.dtype == "float32"
        assert client.kv_capacity_tokens == 16384
        tasks = await streaming(client, 4, 1900)
        deadline = time.monotonic() + 5.0  # SGLang reports its load with a small delay.
        while (status := await client.status()).running_requests != 4:
            assert time.monotonic() < deadline, status
            await asyncio.sleep(0.05)
        assert status.queued_requests == 0
        assert 0 < status.kv_usage < 1
        await client.abort([f"r{i}" for i in range(4)])
        await asyncio.gather(*tasks)
        await client.flush_cache()

    engine.run(check)
