"""Tests that new requests never reuse a prompt prefix that older weights computed (`kv: keep`)."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_async.engines.sglang import prefix as sglang_prefix
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.trajectory.types import PolicyVersion
from tests.engine import (
    EngineUnderTest,
    collect,
    logprobs_of,
    make_request,
    reference_logprobs,
    tokens_of,
    until_streaming,
)

OLD, NEW = PolicyVersion(5, 1), PolicyVersion(5, 2)
PROMPT = [int(token) for token in np.random.default_rng(3).integers(1, 128, 64)]


def test_waiting_requests_get_the_new_versions_salt_and_running_ones_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = ["5.1"]
    monkeypatch.setattr(sglang_prefix, "_version", lambda: current[0])
    running, waiting, later = (SimpleNamespace(cache_salt=None) for _ in range(3))
    scheduler = SimpleNamespace(waiting_queue=[waiting])
    for req in (running, waiting):
        sglang_prefix.before_queue(scheduler, req)
    current[0] = "5.2"
    sglang_prefix.after_change(None, scheduler, "5.2")
    sglang_prefix.before_queue(scheduler, later)
    assert [r.cache_salt for r in (running, waiting, later)] == ["5.1", "5.2", "5.2"]
    sglang_prefix.before_queue(scheduler, running, is_retracted=True)
    assert running.cache_salt == "5.2"


def _error(engine: EngineUnderTest, model: str, chunks: list[Any]) -> float:
    """Return the largest absolute difference between the response's log-probs and those of
    `model`."""
    ids = [*PROMPT, *tokens_of(chunks).tolist()]
    expected = reference_logprobs(engine.models[model], ids)[len(PROMPT) - 1 :]
    return float(np.abs(logprobs_of(chunks) - expected).max())


@pytest.mark.engine
@pytest.mark.slow
def test_request_started_after_an_in_place_update_uses_only_new_weights(
    sglang_engine: EngineUnderTest,
) -> None:
    """A request that was sent before the update, and waited in the engine's queue during the
    update, also uses only the new weights."""
    engine = sglang_engine
    engine.reset_to("a", OLD)
    capacity = engine.run(lambda client: _capacity(client))
    long = 1900
    fillers = capacity // (len(PROMPT) + long)

    async def check(client: SGLangClient) -> tuple[list[Any], list[Any], list[list[Any]]]:
        before = await collect(client, make_request("before", PROMPT, 8))
        assert _error(engine, "a", before) < 1e-4
        arrived: list[list[Any]] = [[] for _ in range(fillers)]
        running = [
            asyncio.create_task(collect(client, make_request(f"f{i}", PROMPT, long), into))
            for i, into in enumerate(arrived)
        ]
        await until_streaming(arrived)
        queued = asyncio.create_task(collect(client, make_request("queued", PROMPT, long)))
        deadline = asyncio.get_running_loop().time() + 20
        while (await client.status()).queued_requests == 0:
            assert asyncio.get_running_loop().time() < deadline, "the engine queued no request"
            await asyncio.sleep(0.05)
        await client.pause("in_place")
        await asyncio.to_thread(engine.load, "b", NEW, False)
        await client.resume()
        await client.abort([f"f{i}" for i in range(fillers)])
        await asyncio.gather(*running)
        new = await collect(client, make_request("new", PROMPT, 8))
        await client.abort(["queued"])
        return new, await queued, arrived

    new, queued, running = engine.run(check)
    assert {chunk.version for chunk in new} == {chunk.version for chunk in queued} == {NEW}
    assert len(tokens_of(queued)) > 0
    assert _error(engine, "b", new) < 1e-4
    assert _error(engine, "b", queued) < 1e-4
    assert any({c.version for c in chunks} == {OLD, NEW} for chunks in running), "no request ran on"


async def _capacity(client: SGLangClient) -> int:
    return client.kv_capacity_tokens


@pytest.mark.engine
@pytest.mark.slow
def test_group_members_share_a_cached_prompt_only_within_one_version(
    sglang_engine: EngineUnderTest,
) -> None:
    engine = sglang_engine
    engine.reset_to("a", OLD)

    def cached() -> int:
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}}
        return int(engine.post("generate", body)["meta_info"]["cached_tokens"])

    assert cached() == 0 and cached() == len(PROMPT) - 1
    engine.post("pause_generation", {"mode": "in_place"})
    engine.load("b", NEW, flush_cache=False)
    engine.post("continue_generation", {"torch_empty_cache": False})
    assert cached() == 0 and cached() == len(PROMPT) - 1
