"""Ray actors, one for each inference engine, and the launcher through which the fleet uses them.

Invariants
- An actor owns at most one server process. If the actor dies, so does its server (the lifeline of
  sglang/server.py), wherever Ray had placed it.
- A restarted engine has a new id: news of its predecessor cannot be mistaken for its own.
- Every call has a limit; a dead actor or server is a ComponentFailure in one sentence.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from megatron_async.config import RunConfig
from megatron_async.config.files import vocabulary_of
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineError
from megatron_async.engines.nodes import NODE_HOST, NOT_ON_TRAINER_NODES, node_address
from megatron_async.engines.relay import Pace, RelayedEngine, Started, StreamRelay
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess, resolve_device
from megatron_async.engines.token_report import TokenReport
from megatron_async.errors import ComponentFailure, ProcessKilled, one_line
from megatron_async.runtime.garbage_collection import search_rarely
from megatron_async.weight_sync.gpu_sharing import gpus_of

_CALL_SECONDS = 30.0
_STOP_SECONDS = 60.0
_START_MARGIN_SECONDS = 60.0


class EngineHost:
    """Body of an engine's actor; plain Python, so that it can be used without Ray.

    `update`, `abort` and `report` are those of the relay of its server's streams.
    """

    def __init__(
        self,
        engine_id: str,
        model_path: str,
        settings_json: str,
        log_path: str,
        in_place: bool,
        chunk_tokens: int,
        shared_index: int | None = None,
        vocabulary: int | None = None,
    ) -> None:
        """`shared_index`: the engine's, on GPUs that it shares with trainer ranks.

        `vocabulary`: tokens of the model; None: not known.
        """
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._engine_id = engine_id
        settings = EngineConfig.model_validate_json(settings_json)
        if settings.host == NODE_HOST:
            settings = settings.model_copy(update={"host": node_address()})
        self._settings = settings
        self._chunk_tokens = chunk_tokens
        self._vocabulary = vocabulary
        gpus = None
        if shared_index is not None:
            gpus = gpus_of(shared_index, settings.tensor, os.environ.get("CUDA_VISIBLE_DEVICES"))
        self._server = SGLangProcess(
            Path(model_path),
            settings,
            Path(log_path),
            gpus=gpus,
            in_place=in_place,
            awaits_weights=True,
        )
        self._relay: StreamRelay | None = None

    async def start(self) -> str:
        """Start the server; returns its URL. Raises ComponentFailure."""
        await asyncio.to_thread(self._server.start)
        return await self.serve(self._server.url)

    async def serve(self, url: str) -> str:
        """Relay the streams of the server at `url`. Raises EngineError."""
        client = await SGLangClient.connect(self._engine_id, url, self._settings, self._vocabulary)
        self._relay = StreamRelay(client, self._chunk_tokens)
        search_rarely()
        return url

    async def alive(self) -> bool:
        """Return whether the server process exists."""
        return self._server.alive()

    async def stop(self) -> None:
        """End the server; nothing is left of it."""
        if self._relay is not None:
            await self._relay.close()
        await asyncio.to_thread(self._server.stop)

    async def update(self, pickled: bytes) -> None:
        self._running.update(*pickle.loads(pickled))

    async def abort(self, requests: Mapping[str, int]) -> None:
        await self._running.abort(requests)

    async def report(self, acknowledged: Sequence[int]) -> bytes:
        return pickle.dumps(await self._running.report(acknowledged))

    @property
    def _running(self) -> StreamRelay:
        if self._relay is None:
            raise EngineError(f"{self._engine_id} has not started")
        return self._relay


class ActorCalls:
    """The relay in an engine's actor (`RelayCalls`); `actor` has the methods of `EngineHost`.

    Messages are pickled here: Ray would hand on each of their arrays by itself.
    """

    def __init__(self, actor: Any, engine_id: str, limit_seconds: float) -> None:
        self._actor = actor
        self._engine_id = engine_id
        self._limit = limit_seconds

    async def update(self, started: Sequence[Started], cancelled: Sequence[int]) -> None:
        await self._call(self._actor.update, pickle.dumps((started, cancelled)))

    async def abort(self, requests: Mapping[str, int]) -> None:
        await self._call(self._actor.abort, requests)

    async def report(self, acknowledged: Sequence[int]) -> TokenReport:
        report: TokenReport = pickle.loads(await self._call(self._actor.report, acknowledged))
        return report

    async def _call(self, method: Any, *arguments: Any) -> Any:
        try:
            what = f"the relay of {self._engine_id}"
            return await _answer(method.remote(*arguments), self._limit, what)
        except ComponentFailure as failure:
            raise EngineError(str(failure)) from failure


class RayEngineLauncher:
    """Starts and stops the engines of a run, each in an actor of its own (`EngineLauncher`)."""

    def __init__(
        self, config: RunConfig, log_directory: Path, host: type[EngineHost] = EngineHost
    ) -> None:
        """`host` is what an engine's actor does."""
        self._actor_class = ray.remote(max_restarts=0)(host)
        self._config = config
        self._settings = config.engines
        self._pace = Pace()
        self._log_directory = log_directory
        self._actors: dict[int, Any] = {}
        self._clients: dict[int, RelayedEngine] = {}
        self._launches: dict[int, int] = {}

    async def launch(self, index: int) -> RelayedEngine:
        """A client of engine `index`, started anew. Raises ComponentFailure."""
        await self.stop(index)
        launches = self._launches.get(index, 0)
        self._launches[index] = launches + 1
        engine_id = f"engine{index}" if launches == 0 else f"engine{index}.{launches}"
        actor = self._make_actor(index, engine_id)
        self._actors[index] = actor
        limit = self._settings.start_timeout_seconds + _START_MARGIN_SECONDS
        try:
            url = await _answer(actor.start.remote(), limit, f"the start of {engine_id}")
            server = await SGLangClient.connect(engine_id, url, self._settings)
        except EngineError as error:
            await self.stop(index)
            raise ProcessKilled(f"{engine_id} started but does not answer: {error}") from error
        except BaseException:
            await self.stop(index)
            raise
        calls = ActorCalls(actor, engine_id, self._settings.no_progress_seconds)
        client = self._clients[index] = RelayedEngine(server, calls, self._pace)
        return client

    async def alive(self, index: int) -> bool:
        """Return whether the server process of engine `index` exists; True while it is unknown."""
        actor = self._actors.get(index)
        if actor is None:
            return False
        try:
            return bool(await _answer(actor.alive.remote(), _CALL_SECONDS, f"engine {index}"))
        except ProcessKilled:
            return False
        except ComponentFailure:
            return True  # a slow answer of Ray is no evidence about the engine

    async def stop(self, index: int) -> None:
        """End engine `index` with its actor; does nothing if it is not there."""
        client = self._clients.pop(index, None)
        if client is not None:
            await client.close()
        actor = self._actors.pop(index, None)
        if actor is None:
            return
        try:
            await _answer(actor.stop.remote(), _STOP_SECONDS, f"the stop of engine {index}")
        except ComponentFailure:
            # The actor is gone or stuck; killing it below takes the server along.
            pass
        finally:
            ray.kill(actor)

    def _make_actor(self, index: int, engine_id: str) -> Any:
        on_gpu = resolve_device(self._settings) == "cuda"
        # Which GPU an engine is on matters where trainer ranks are on them; Ray gives any.
        shared = on_gpu and self._settings.placement == "colocated"
        return self._actor_class.options(  # type: ignore[attr-defined]
            num_cpus=0,
            num_gpus=self._settings.tensor if on_gpu and not shared else 0,
            label_selector=NOT_ON_TRAINER_NODES,
        ).remote(
            engine_id,
            str(self._config.model.path),
            self._settings.model_dump_json(),
            str((self._log_directory / f"engine{index}.log").resolve()),
            self._config.schedule.in_place,
            self._config.store.chunk_tokens,
            index if shared else None,
            vocabulary_of(self._config.model.path),
        )


async def _answer(reference: Any, limit_seconds: float, what: str) -> Any:
    """The result of a remote call; ComponentFailure if it fails, or does not come in time."""
    try:
        # Not `wait_for`: until Python 3.12 it may give a result although it is cancelled.
        async with asyncio.timeout(limit_seconds):
            return await reference
    except TimeoutError as error:
        raise ComponentFailure(f"{what} did not end within {limit_seconds:g} seconds") from error
    except RayTaskError as error:
        if isinstance(error.cause, ComponentFailure | EngineError):
            raise type(error.cause)(str(error.cause)) from error
        raise ComponentFailure(f"{what} failed: {one_line(error.cause)}") from error
    except RayActorError as error:
        raise ProcessKilled(f"{what}: its Ray actor has died: {one_line(error)}") from error
