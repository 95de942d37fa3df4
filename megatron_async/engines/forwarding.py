"""An `EngineClient` that hands every call on to another: the base of those that add something."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from megatron_async.engines.interface import (
    EngineClient,
    EngineStatus,
    GenerationRequest,
    PauseMode,
    TokenChunk,
)
from megatron_async.trajectory.types import PolicyVersion


class ForwardingClient:
    """Every call goes to `client`."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.engine_id = client.engine_id
        self.url = client.url
        self.kv_capacity_tokens = client.kv_capacity_tokens
        self.longest_tokens = client.longest_tokens
        self.dtype = client.dtype

    def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        return self._client.generate(request)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._client.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._client.pause(mode)

    async def resume(self) -> None:
        await self._client.resume()

    async def flush_cache(self) -> None:
        await self._client.flush_cache()

    async def release_memory(self, *, keep_weights: bool = False) -> None:
        await self._client.release_memory(keep_weights=keep_weights)

    async def resume_memory(self, *, weights_only: bool) -> None:
        await self._client.resume_memory(weights_only=weights_only)

    async def version(self) -> PolicyVersion:
        return await self._client.version()

    async def checksum(self) -> str:
        return await self._client.checksum()

    async def status(self) -> EngineStatus:
        return await self._client.status()

    async def healthy(self) -> bool:
        return await self._client.healthy()

    async def close(self) -> None:
        await self._client.close()
