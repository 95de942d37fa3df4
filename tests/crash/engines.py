"""Provides simulated engines that fail on command, each a server with SGLang's endpoints.

The tokens of such an engine depend on the policy version that it has loaded (`weights_of`), not on
the version that it reports. Tokens of wrong weights can therefore be recognized by their content.

Invariants
- Faults are injected only through the methods of `FaultyServer`, and change only how this server
  treats its requests.
- All engines run on a separate thread, so that they reply while the manager's event loop is
  blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import zlib
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from aiohttp import web

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineClient
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import NO_VERSION
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.engines.simulated.server import SimulatedServer
from megatron_async.errors import ProcessKilled
from megatron_async.trajectory.types import PolicyVersion
from tests.crash.checks import weights_of

T = TypeVar("T")
Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]

_LATE_SECONDS = 0.15
_CALL_SECONDS = 30.0
_END_SECONDS = 0.05
_GARBAGE = (
    b"data: {not json\n\n",
    b'data: {"output_ids": [5, 6, 7], "meta_info": {"completion_tokens": 4000}}\n\n',
    b'data: {"output_ids": [9], "meta_info": {"completion_tokens": -1}}\n\n',
    b"data: []\n\n",
    b'data: {"meta_info": {"finish_reason": {"type": "stop"}}}\n\n',
    b"\x00\xff\x00\xff" * 64,
)


class FaultyEngine(SimulatedEngine):
    """Simulated engine whose tokens follow from the policy version that it has loaded."""

    def __init__(self, engine_id: str, model: SimulatedEngineModel) -> None:
        super().__init__(engine_id, weights_of(model, NO_VERSION), NO_VERSION)
        self._base = model
        self.lies = 0

    def set_weights(self, version: PolicyVersion, weights: str = "") -> None:
        """Load `version`; while the engine lies, change only the version that it reports."""
        held = self._model
        super().set_weights(version, weights)
        self._model = held if self.lies else weights_of(self._base, version)

    def restart(self, version: PolicyVersion) -> None:
        super().restart(version)
        self._model = weights_of(self._base, version)


class FaultyServer(SimulatedServer):
    """Server of a `FaultyEngine` that misbehaves for some time or for some requests."""

    def __init__(self, engine: FaultyEngine) -> None:
        super().__init__(engine, ["weight"], NO_VERSION, "")
        self._faulty = engine
        self._answers = asyncio.Event()
        self._answers.set()
        self._late = False
        self._broken = False
        self._spoilt: list[str] = []

    def hang(self) -> None:
        """Suspend all replies and streams until `heal` is called."""
        self._answers.clear()

    def late(self) -> None:
        """Delay every reply and every chunk of a stream."""
        self._late = True

    def broken(self) -> None:
        """Reply to every call with a 5xx status and cut off every stream."""
        self._broken = True

    def heal(self) -> None:
        """End all faults that last for some time: `hang`, `late` and `broken`."""
        self._answers.set()
        self._late = self._broken = False

    def spoil(self, kind: str, count: int) -> None:
        """Apply the fault `kind` to the next `count` generation requests."""
        self._spoilt += [kind] * count

    def lie(self, updates: int) -> None:
        """Let the next `updates` weight updates change only the version that the engine reports."""
        self._faulty.lies += updates

    def restart(self) -> None:
        """Restart the engine at the same address with the weights of its model directory."""
        self._faulty.crash("the engine restarts")
        self._faulty.restart(NO_VERSION)
        self._version, self._checksum, self._session_open = NO_VERSION, "initial", False

    # ------------------------------------------------------------ faults

    async def _delay(self) -> None:
        # The wait ends when heal() is called, at the latest when the server ends.
        await self._answers.wait()
        if self._late:
            await asyncio.sleep(_LATE_SECONDS)

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:  # type: ignore[override]
        await self._delay()
        if self._broken:
            return web.json_response({"message": "the engine is broken"}, status=503)
        return await super()._guarded(request, handler)

    def _take(self, version: str, checksum: str) -> None:
        if self._faulty.lies:
            checksum = self._checksum
        super()._take(version, checksum)
        self._faulty.lies = max(0, self._faulty.lies - 1)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        kind = self._spoilt.pop(0) if self._spoilt else ""
        if kind == "engine refuses requests":
            return web.json_response({"message": "the input is too odd"}, status=400)
        if kind == "engine answers 5xx":
            return web.json_response({"message": "out of luck"}, status=500)
        answer = _SpoiltResponse(self, kind)
        return await self._stream(request, answer)


class _SpoiltResponse(web.StreamResponse):
    """Stream that delays its chunks like its server and may spoil its first chunk."""

    def __init__(self, server: FaultyServer, kind: str) -> None:
        super().__init__(headers={"Content-Type": "text/event-stream"})
        self._server = server
        self._kind = kind
        self._parts = 0

    async def write(self, data: Any) -> None:
        await self._server._delay()
        self._parts += 1
        if self._kind == "engine answers garbage" and self._parts == 1:
            data = _GARBAGE[zlib.crc32(bytes(data)) % len(_GARBAGE)]
        if self._server._broken or (self._kind == "engine drops streams" and self._parts == 1):
            await super().write(bytes(data)[: len(data) // 2])
            request = self._req
            assert request is not None and request.transport is not None
            request.transport.abort()
            return
        await super().write(data)


class EngineThread:
    """Thread with the event loop on which all engines of a run are served."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="engines", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run `work` on the engines' loop; return a future of its result on the caller's loop."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def do(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call `work` on the engines' loop without waiting; calls keep their order."""
        self.loop.call_soon_threadsafe(work, *arguments)

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(_CALL_SECONDS)


class Served:
    """The running server of one engine; stands for the engine's process."""

    def __init__(self, server: FaultyServer, runner: web.AppRunner, url: str) -> None:
        self.server, self.runner, self.url = server, runner, url
        self.alive = True

    @classmethod
    async def start(cls, engine_id: str, model: SimulatedEngineModel) -> Served:
        """Start a server on a free port. Call this on the engines' loop."""
        server = FaultyServer(FaultyEngine(engine_id, model))
        # A shutdown must not wait for hanging requests. A timeout of 0 would mean no limit.
        runner = web.AppRunner(server.application(), shutdown_timeout=_END_SECONDS)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        return cls(server, runner, f"http://{host}:{port}")

    async def end(self) -> None:
        """End the server and abort its connections, as the death of its process would."""
        if not self.alive:
            return
        self.alive = False
        self.server.heal()  # Hanging requests must continue before they can end.
        for connection in list(self.runner.server.connections if self.runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()
        await self.runner.cleanup()
        await self.server._faulty.close()


class FaultyLauncher:
    """`EngineLauncher` that starts `FaultyServer`s."""

    def __init__(
        self,
        settings: EngineConfig,
        model: SimulatedEngineModel,
        thread: EngineThread,
        *,
        control_seconds: float,
    ) -> None:
        """Prepare to launch engines.

        Args:
            settings: The run's engine settings.
            model: Model from which `weights_of` derives the tokens of each policy version.
            thread: Thread that serves the engines.
            control_seconds: Time limit of a client's call. It replaces the product's limit, because
                all time limits of these runs are shorter.
        """
        self._settings, self._model, self._thread = settings, model, thread
        self._control_seconds = control_seconds
        self._served: dict[int, Served] = {}
        self._launches: dict[int, int] = {}
        self._clients: dict[int, SGLangClient] = {}

    def serving(self) -> list[Served]:
        """Return the servers that are alive, in order of their engines' indices."""
        return [s for _, s in sorted(self._served.items()) if s.alive]

    async def launch(self, index: int) -> EngineClient:
        await self.stop(index)
        launches = self._launches.get(index, 0)
        self._launches[index] = launches + 1
        engine_id = f"engine{index}.{launches}"
        served = await self._thread.call(Served.start(engine_id, self._model))
        self._served[index] = served
        try:
            client = await SGLangClient.connect(engine_id, served.url, self._settings)
            client._control_seconds = self._control_seconds
            self._clients[index] = client
            return client
        except Exception as error:
            raise ProcessKilled(f"{engine_id} has started but does not reply: {error}") from error

    async def alive(self, index: int) -> bool:
        served = self._served.get(index)
        return served is not None and served.alive

    async def stop(self, index: int) -> None:
        client = self._clients.pop(index, None)
        if client is not None:
            await client.close()
        served = self._served.pop(index, None)
        if served is not None:
            with contextlib.suppress(ConnectionError):
                await self._thread.call(served.end())
