"""Tests that SGLang's watchdog, which ends an engine that hangs, does not end a paused engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_async.engines.interface import TokenChunk
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from tests.engine import SETTINGS, collect, make_request, tokens_of, until_streaming
from tests.hf_models import save_hf_model

WATCHDOG_SECONDS = 5
PAUSE_SECONDS = 3 * WATCHDOG_SECONDS
LENGTH = 400


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_engine_survives_a_pause_longer_than_its_watchdog(tmp_path: Path) -> None:
    """A request is running during the pause; it keeps its KV cache and continues afterward."""
    model = tmp_path / "model"
    save_hf_model("qwen3", model, seed=1, vocab_size=128, max_position_embeddings=2048)
    settings = SETTINGS.model_copy(
        update={"extra_args": ["--watchdog-timeout", str(WATCHDOG_SECONDS)]}
    )
    server = SGLangProcess(model, settings, tmp_path / "engine.log")

    async def pause_in_the_middle() -> int:
        client = await SGLangClient.connect("engine", server.url, settings)
        try:
            response: list[TokenChunk] = []
            task = asyncio.create_task(
                collect(client, make_request("long", [1, 2, 3], LENGTH), response)
            )
            await until_streaming([response], 1)
            await client.pause("in_place")
            await asyncio.sleep(PAUSE_SECONDS)
            assert server.alive(), server.log_path.read_text()[-3000:]
            assert not task.done(), "the response ended before the pause"
            await client.resume()
            return len(tokens_of(await asyncio.wait_for(task, 60)))
        finally:
            await client.close()

    server.start()
    try:
        assert asyncio.run(pause_in_the_middle()) == LENGTH
    finally:
        server.stop()
