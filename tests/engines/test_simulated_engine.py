"""The simulated engine behaves like a real one where the rollout driver can observe it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from megatron_async.engines.interface import EngineError
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.trajectory.types import PolicyVersion
from tests.engine import collect, crash_after, make_request, tokens_of

PROMPT = [5, 9, 17]
SLOW = SimulatedEngineModel(step_seconds=0.002, stream_interval=4)


async def test_an_aborted_and_resumed_response_is_the_uninterrupted_one() -> None:
    engine = SimulatedEngine("one", SLOW)
    whole = await collect(engine, make_request("whole", PROMPT, 60))
    task = asyncio.create_task(collect(engine, make_request("cut", PROMPT, 60)))
    await asyncio.sleep(0.05)
    await engine.abort(["cut", "unknown"])
    first = tokens_of(await task).tolist()
    engine.set_weights(PolicyVersion(0, 1))
    rest = make_request("cut", [*PROMPT, *first], 60 - len(first))
    second = tokens_of(await collect(engine, rest)).tolist()
    await engine.close()
    assert 0 < len(first) < 60
    assert first + second == tokens_of(whole).tolist()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_weight_change_splits_a_running_response_between_two_tokens(mode: Any) -> None:
    engine = SimulatedEngine("one", SLOW)
    task = asyncio.create_task(collect(engine, make_request("r", PROMPT, 40)))
    await asyncio.sleep(0.03)
    await engine.pause(mode)
    before = engine.tokens_generated
    engine.set_weights(PolicyVersion(0, 1))
    await engine.resume()
    chunks = await task
    assert await engine.version() == PolicyVersion(0, 1)
    await engine.close()
    versions = [chunk.version.number for chunk in chunks for _ in chunk.token_ids]
    assert 0 < before < 40 and versions == [0] * before + [1] * (40 - before)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_a_paused_engine_generates_nothing(mode: Any) -> None:
    engine = SimulatedEngine("one", SLOW)
    running = asyncio.create_task(collect(engine, make_request("r", PROMPT, 40)))
    await asyncio.sleep(0.02)
    await engine.pause(mode)
    await asyncio.sleep(0.01)
    before = engine.tokens_generated
    late = asyncio.create_task(collect(engine, make_request("late", PROMPT, 3)))
    await asyncio.sleep(0.05)
    assert engine.tokens_generated == before and not late.done()
    assert running.done() == (mode == "abort")
    await engine.resume()
    assert len(tokens_of(await late)) == 3
    end = (await running)[-1].end
    assert end == ("abort" if mode == "abort" else "length")
    assert (await engine.status()).preemptions_total == 0, "SGLang does not count a pause"
    await engine.close()


async def test_a_crash_ends_every_stream_and_every_later_call_until_a_restart() -> None:
    engine = SimulatedEngine("one", SLOW)
    crash_after(engine, 50)
    tasks = [
        asyncio.create_task(collect(engine, make_request(f"r{i}", PROMPT, 100))) for i in range(4)
    ]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    assert engine.tokens_generated == 50
    assert not await engine.healthy()
    with pytest.raises(EngineError, match="one: version: the engine died"):
        await engine.version()
    engine.restart(PolicyVersion(1, 0))
    assert len(tokens_of(await collect(engine, make_request("r", PROMPT, 5)))) == 5
    await engine.close()


async def test_a_full_cache_preempts_the_newest_requests_and_loses_nothing() -> None:
    async def body(capacity: int) -> tuple[list[list[int]], int]:
        model = SimulatedEngineModel(step_seconds=0.0005, kv_capacity_tokens=capacity)
        engine = SimulatedEngine("one", model)
        requests = [make_request(f"r{i}", [i + 1], 40) for i in range(4)]
        chunks = await asyncio.gather(*(collect(engine, request) for request in requests))
        preemptions = (await engine.status()).preemptions_total
        await engine.close()
        return [tokens_of(response).tolist() for response in chunks], preemptions

    roomy, none = await body(1000)
    tight, some = await body(100)
    assert none == 0 < some
    assert tight == roomy
