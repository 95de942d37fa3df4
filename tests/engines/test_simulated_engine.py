"""The simulated engine behaves like a real one where the rollout driver can observe it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_async.engines.interface import EngineClient, EngineError, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.trajectory.types import PolicyVersion
from tests.engine import collect, crash_after, logprobs_of, make_request, tokens_of

PROMPT = [5, 9, 17]
SLOW = SimulatedEngineModel(step_seconds=0.002, stream_interval=4)


def _run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 20.0))


def test_it_is_an_engine_client() -> None:
    client: EngineClient = SimulatedEngine("one")
    assert client.engine_id == "one" and client.url == "simulated://one"
    assert client.kv_capacity_tokens > 0


def test_the_same_request_gives_the_same_response() -> None:
    async def body() -> list[list[TokenChunk]]:
        engines = [SimulatedEngine(str(i)) for i in range(2)]
        other = SimulatedEngine("other", SimulatedEngineModel(seed=1))
        request = make_request("r", PROMPT, 400, forced=False, stop_token_ids=(2,))
        return [await collect(engine, request) for engine in (*engines, other)]

    one, two, other = _run(body())
    assert (tokens_of(one) == tokens_of(two)).all()
    assert (logprobs_of(one) == logprobs_of(two)).all()
    assert tokens_of(one).tolist() != tokens_of(other).tolist()
    assert one[-1].end == "stop" and tokens_of(one)[-1] == 2


def test_a_stop_token_is_the_last_token_of_its_response_or_forced_away() -> None:
    async def body() -> tuple[list[list[int]], list[int]]:
        model = SimulatedEngineModel(vocab_size=6, mean_length=30)  # 2 would come by chance
        engine = SimulatedEngine("one", model)
        free = [
            tokens_of(
                await collect(engine, make_request(f"{i}", [i], 500, False, stop_token_ids=(2,)))
            ).tolist()
            for i in range(30)
        ]
        forced = await collect(engine, make_request("f", [5], 90, stop_token_ids=(2,)))
        await engine.close()
        return free, tokens_of(forced).tolist()

    free, forced = _run(body())
    assert all(tokens.index(2) == len(tokens) - 1 for tokens in free)
    assert 2 in forced[:-1] and len(forced) == 90


def test_an_aborted_and_resumed_response_is_the_uninterrupted_one() -> None:
    async def body() -> tuple[list[int], list[int], int]:
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
        return tokens_of(whole).tolist(), first + second, len(first)

    whole, resumed, cut = _run(body())
    assert 0 < cut < 60
    assert resumed == whole


def test_lengths_can_be_forced_and_are_spread_otherwise() -> None:
    async def body() -> tuple[list[int], list[int]]:
        engine = SimulatedEngine("one", SimulatedEngineModel(mean_length=20))

        async def length(i: int, limit: int, forced: bool) -> int:
            chunks = await collect(engine, make_request(f"{i}{forced}", [i], limit, forced))
            return len(tokens_of(chunks))

        forced = await asyncio.gather(*(length(i, i, True) for i in range(1, 40)))
        free = await asyncio.gather(*(length(i, 1000, False) for i in range(1, 200)))
        await engine.close()
        return forced, free

    forced, free = _run(body())
    assert forced == list(range(1, 40))
    assert 10 < np.mean(free) < 40 and max(free) > 3 * np.median(free)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_weight_change_splits_a_running_response_between_two_tokens(mode: Any) -> None:
    async def body() -> tuple[list[TokenChunk], int]:
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
        return chunks, before

    chunks, before = _run(body())
    versions = [chunk.version.number for chunk in chunks for _ in chunk.token_ids]
    assert 0 < before < 40 and versions == [0] * before + [1] * (40 - before)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_paused_engine_generates_nothing(mode: Any) -> None:
    async def body() -> None:
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

    _run(body())


def test_a_crash_ends_every_stream_and_every_later_call_until_a_restart() -> None:
    async def body() -> None:
        engine = SimulatedEngine("one", SLOW)
        crash_after(engine, 50)
        tasks = [
            asyncio.create_task(collect(engine, make_request(f"r{i}", PROMPT, 100)))
            for i in range(4)
        ]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineError) for result in results)
        assert engine.tokens_generated == 50
        with pytest.raises(EngineError, match="one: version: the engine died"):
            await engine.version()
        engine.restart(PolicyVersion(1, 0))
        assert len(tokens_of(await collect(engine, make_request("r", PROMPT, 5)))) == 5
        await engine.close()

    _run(body())


def test_requests_queue_when_the_engine_is_full() -> None:
    async def body() -> None:
        model = SimulatedEngineModel(step_seconds=0.001, max_running_requests=2)
        engine = SimulatedEngine("one", model)
        tasks = [
            asyncio.create_task(collect(engine, make_request(f"r{i}", PROMPT, 30)))
            for i in range(5)
        ]
        await asyncio.sleep(0.01)
        status = await engine.status()
        assert (status.running_requests, status.queued_requests) == (2, 3)
        assert [len(tokens_of(chunks)) for chunks in await asyncio.gather(*tasks)] == [30] * 5
        await engine.close()

    _run(body())


def test_a_full_cache_preempts_the_newest_requests_and_loses_nothing() -> None:
    async def body(capacity: int) -> tuple[list[list[int]], int]:
        model = SimulatedEngineModel(step_seconds=0.0005, kv_capacity_tokens=capacity)
        engine = SimulatedEngine("one", model)
        requests = [make_request(f"r{i}", [i + 1], 40) for i in range(4)]
        chunks = await asyncio.gather(*(collect(engine, request) for request in requests))
        preemptions = (await engine.status()).preemptions_total
        await engine.close()
        return [tokens_of(response).tolist() for response in chunks], preemptions

    roomy, none = _run(body(1000))
    tight, some = _run(body(100))
    assert none == 0 < some
    assert tight == roomy


def test_an_urgent_request_goes_before_those_that_wait() -> None:
    async def body() -> None:
        engine = SimulatedEngine("one", replace(SLOW, max_running_requests=1))
        ended: list[str] = []

        async def ask(name: str, **changes: bool) -> None:
            await collect(engine, make_request(name, PROMPT, 5, **changes))
            ended.append(name)

        tasks = [asyncio.create_task(ask(name)) for name in ("runs", "waits")]
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(ask("urgent", urgent=True)))
        await asyncio.gather(*tasks)
        await engine.close()
        assert ended == ["runs", "urgent", "waits"]

    _run(body())


def test_checksums_follow_the_weights() -> None:
    async def body() -> None:
        engine, twin = SimulatedEngine("one"), SimulatedEngine("two")
        assert await engine.checksum() == await twin.checksum()
        engine.set_weights(PolicyVersion(0, 1))
        assert await engine.checksum() != await twin.checksum()
        await engine.close()

    _run(body())


def test_closing_a_stream_frees_its_slot() -> None:
    async def body() -> None:
        engine = SimulatedEngine("one", SLOW)
        stream = engine.generate(make_request("r", PROMPT, 1000))
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        assert (await engine.status()).running_requests == 0
        await engine.close()

    _run(body())
