"""A client that was closed, because its engine was given up, fails as a call to an engine does."""

import asyncio

import numpy as np
import pytest

from megatron_async.config.rollout import EngineConfig, SamplingConfig
from megatron_async.engines.interface import EngineError, GenerationRequest
from megatron_async.engines.sglang.client import SGLangClient


def test_every_call_of_a_closed_client_is_an_engine_error() -> None:
    """aiohttp's own RuntimeError would count as a defect and end the run."""

    async def body() -> None:
        client = SGLangClient("engine0", "http://127.0.0.1:9", EngineConfig())
        await client.close()
        assert not await client.healthy()
        for call in (client.version, client.status, client.flush_cache, client.resume):
            with pytest.raises(EngineError, match="the client has been closed"):
                await call()
        request = GenerationRequest("t1-1;", np.asarray([1, 2], np.int32), 4, SamplingConfig())
        with pytest.raises(EngineError, match="the client has been closed"):
            async for _ in client.generate(request):
                pass

    asyncio.run(body())
