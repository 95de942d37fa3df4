"""A client that was closed, or has lost its connection, fails as a call to an engine does.

aiohttp's own RuntimeError would count as a defect and end the run.
"""

import asyncio

import numpy as np
import orjson
import pytest

from megatron_async.config.rollout import EngineConfig, SamplingConfig
from megatron_async.engines.interface import EngineError, GenerationRequest
from megatron_async.engines.sglang.client import SGLangClient

REPORT = {
    "output_ids": [7],
    "meta_info": {
        "completion_tokens": 1,
        "output_token_logprobs": [[-1.0, 7, None]],
        "finish_reason": None,
        "weight_versions": [{"version": "0.0", "start": 0, "end": 1}],
    },
}


def test_every_call_of_a_closed_client_is_an_engine_error() -> None:
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


@pytest.mark.parametrize("last_words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_stream_whose_connection_breaks_is_an_engine_error(last_words: bytes) -> None:
    """Between two reads, or by bytes that are no part of an answer."""

    async def body() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            event = b"data: " + orjson.dumps(REPORT) + b"\n\n"
            writer.write(b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
            await lost.wait()
            writer.write(last_words)
            await asyncio.sleep(0.1)
            writer.transport.abort()

        lost = asyncio.Event()
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = SGLangClient("engine0", f"http://127.0.0.1:{port}", EngineConfig())
        request = GenerationRequest("t1-1;", np.asarray([1, 2], np.int32), 4, SamplingConfig())
        stream = client.generate(request)
        assert (await anext(stream)).token_ids.tolist() == [7]
        lost.set()
        await asyncio.sleep(0.3)
        with pytest.raises(EngineError, match="generation of request t1-1; failed"):
            await anext(stream)
        await client.close()
        server.close()

    asyncio.run(asyncio.wait_for(body(), 30))
