"""Runs inference engines in host processes, one for each engine, and launches these hosts.

Invariants
- A host owns at most one server process, on the same node. If the host dies, its server ends too:
  the server holds one end of a pipe (a lifeline), which closes with the host.
- A restarted engine has a new id, so late reports of the previous engine cannot be mistaken for its
  own.
- Every call has a time limit. A call to a dead host or server raises a ComponentFailure.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from megatron_async.config import RunConfig
from megatron_async.config.files import vocabulary_of
from megatron_async.engines.interface import EngineError
from megatron_async.engines.nodes import NODE_HOST, node_address
from megatron_async.engines.relay import Pace, RelayedEngine, Started, StreamRelay
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess, resolve_device, resolve_dtype
from megatron_async.engines.token_report import TokenReport
from megatron_async.errors import ComponentFailure, ProcessKilled
from megatron_async.process_backends.backend import ProcessBackend, RemoteObject
from megatron_async.runtime.garbage_collection import tune_gc
from megatron_async.trajectory.types import CHUNK_TOKENS
from megatron_async.weight_sync.gpu_sharing import gpus_of

T = TypeVar("T")
_CALL_SECONDS = 30.0
_STOP_SECONDS = 60.0
_START_MARGIN_SECONDS = 60.0


class EngineHost:
    """Starts, watches and stops the server of one engine, on the same node.

    The methods `update`, `abort` and `report` call the methods of `StreamRelay` that have the same
    names. The relay reads the server's token streams.
    """

    def __init__(
        self,
        engine_id: str,
        config: RunConfig,
        log_path: Path,
        shared_index: int | None = None,
    ) -> None:
        """Prepare the server of an engine, without starting it.

        Args:
            engine_id: Name of the engine.
            config: Settings of the run.
            log_path: Log file of the server.
            shared_index: Index of the engine if it shares GPUs with trainer ranks, from which its
                GPUs follow; otherwise None.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._engine_id = engine_id
        settings, model_path = config.engines, config.model.path
        if settings.host == NODE_HOST:
            settings = settings.model_copy(update={"host": node_address()})
        dtype = resolve_dtype(settings, resolve_device(settings))
        self._settings = settings = settings.model_copy(update={"dtype": dtype})
        self._vocabulary = vocabulary_of(model_path)
        gpus = None
        if shared_index is not None:
            gpus = gpus_of(shared_index, settings.tensor, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._server = SGLangProcess(
            Path(model_path),
            settings,
            log_path,
            gpus=gpus,
            awaits_weights=True,
        )
        self._relay: StreamRelay | None = None

    async def start(self) -> tuple[str, str]:
        """Start the server; return its URL and the dtype of its weights.

        Raises:
            ComponentFailure: If the server does not start.
        """
        await asyncio.to_thread(self._server.start)
        return await self.serve(self._server.url), self._settings.dtype

    async def serve(self, url: str) -> str:
        """Connect to the server at `url` and relay its streams from now on; return the URL.

        Raises:
            EngineError: If the server does not reply as expected.
        """
        client = await SGLangClient.connect(self._engine_id, url, self._settings, self._vocabulary)
        self._relay = StreamRelay(client, CHUNK_TOKENS)
        tune_gc()
        return url

    async def alive(self) -> bool:
        """Return whether the server process exists."""
        return self._server.alive()

    async def stop(self) -> None:
        """Close the relay and stop the server with all its processes."""
        if self._relay is not None:
            await self._relay.close()
        await asyncio.to_thread(self._server.stop)

    async def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None:
        self._running.update(started, canceled)

    async def abort(self, requests: Mapping[str, int]) -> None:
        await self._running.abort(requests)

    async def report(self, acknowledged: Sequence[int]) -> TokenReport:
        return await self._running.report(acknowledged)

    @property
    def _running(self) -> StreamRelay:
        if self._relay is None:
            raise EngineError(f"{self._engine_id} has not started")
        return self._relay


@dataclass(frozen=True)
class HostCalls:
    """Calls, with a time limit, the `StreamRelay` in an engine's host process, which collects the
    tokens of the engine. Implements the interface `RelayCalls`."""

    host: RemoteObject[EngineHost]
    engine_id: str
    limit_seconds: float

    async def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None:
        await self._call(lambda host: host.update(started, canceled))

    async def abort(self, requests: Mapping[str, int]) -> None:
        await self._call(lambda host: host.abort(requests))

    async def report(self, acknowledged: Sequence[int]) -> TokenReport:
        return await self._call(lambda host: host.report(acknowledged))

    async def _call(self, what: Callable[[EngineHost], Awaitable[T]]) -> T:
        try:
            return await self.host.call(what, limit=self.limit_seconds)
        except ComponentFailure as failure:
            raise EngineError(f"the relay of {self.engine_id}: {failure}") from failure


class HostedEngines:
    """Starts and stops the engines of a run, each in its own host process; implements
    `EngineLauncher`."""

    def __init__(
        self,
        config: RunConfig,
        log_directory: Path,
        backend: ProcessBackend,
        host: type[EngineHost] = EngineHost,
    ) -> None:
        """Create the launcher; `host` is the class that runs in the process of each engine."""
        self._host_class = host
        self._config = config
        self._settings = config.engines
        self._pace = Pace()
        self._log_directory = log_directory
        self._backend = backend
        self._hosts: dict[int, RemoteObject[EngineHost]] = {}
        self._clients: dict[int, RelayedEngine] = {}
        self._launches: dict[int, int] = {}
        self._begun: dict[int, asyncio.Task[RelayedEngine]] = {}

    def begin(self) -> None:
        """Start all engines in the background; later calls to `launch` wait for them."""
        for index in range(self._settings.count):
            self._begun[index] = asyncio.create_task(self._launch(index))

    async def launch(self, index: int) -> RelayedEngine:
        """Start engine `index`, or wait for its start if `begin` has started it; return its client.

        Raises:
            ComponentFailure: If the engine does not start.
        """
        begun = self._begun.pop(index, None)
        # No time limit is needed here, because every call of `_launch` has one.
        return await (begun or self._launch(index))

    async def _launch(self, index: int) -> RelayedEngine:
        await self.stop(index)
        launches = self._launches.get(index, 0)
        self._launches[index] = launches + 1
        engine_id = f"engine{index}" if launches == 0 else f"engine{index}.{launches}"
        host = self._hosts[index] = self._start_host(index, engine_id)
        limit = self._settings.start_timeout_seconds + _START_MARGIN_SECONDS
        try:
            url, dtype = await host.call(lambda host: host.start(), limit=limit)
            started = self._settings.model_copy(update={"dtype": dtype})
            server = await SGLangClient.connect(engine_id, url, started)
        except EngineError as error:
            await self.stop(index)
            raise ProcessKilled(f"{engine_id} has started but does not reply: {error}") from error
        except BaseException:
            await self.stop(index)
            raise
        calls = HostCalls(host, engine_id, self._settings.hang_timeout_seconds)
        client = self._clients[index] = RelayedEngine(server, calls, self._pace)
        return client

    async def alive(self, index: int) -> bool:
        """Return whether the server process of engine `index` exists. If the host does not reply in
        time, return True."""
        host = self._hosts.get(index)
        if host is None:
            return False
        try:
            return await host.call(lambda host: host.alive(), limit=_CALL_SECONDS)
        except ProcessKilled:
            return False
        except ComponentFailure:
            # A slow host does not show that its server process has ended.
            return True

    async def stop(self, index: int) -> None:
        """Stop engine `index` and its host; does nothing if it is not running."""
        client = self._clients.pop(index, None)
        if client is not None:
            await client.close()
        host = self._hosts.pop(index, None)
        if host is None:
            return
        try:
            await host.call(lambda host: host.stop(), limit=_STOP_SECONDS)
        except ComponentFailure:
            # The host is dead or does not reply. `host.end` ends its process, and the server ends
            # with the host.
            pass
        finally:
            await asyncio.to_thread(host.end)

    def _start_host(self, index: int, engine_id: str) -> RemoteObject[EngineHost]:
        on_gpu = resolve_device(self._settings) == "cuda"
        # A process backend assigns any free GPUs. An engine that shares GPUs with trainer ranks
        # needs certain ones, so it requests none and chooses them by its index.
        shared = on_gpu and self._settings.placement == "colocated"
        return self._backend.start(
            self._host_class,
            engine_id,
            self._config,
            (self._log_directory / f"engine{index}.log").resolve(),
            index if shared else None,
            name=f"engine{index}-host",
            gpus=self._settings.tensor if on_gpu and not shared else 0,
        )
