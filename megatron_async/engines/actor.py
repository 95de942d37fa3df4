"""One Ray actor per inference engine, and the launcher through which the fleet uses them.

Invariants
- An actor owns at most one server process. If the actor dies, so does its server (the lifeline of
  sglang/server.py), wherever Ray had placed it.
- A restarted engine has a new id: news of its predecessor cannot be mistaken for its own.
- Every call has a limit; a dead actor or server is a ComponentFailure in one sentence.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from megatron_async.config import RunConfig
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineError
from megatron_async.engines.nodes import NODE_HOST, NOT_ON_TRAINER_NODES, node_address
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess, resolve_device
from megatron_async.errors import ComponentFailure, ProcessKilled

_CALL_SECONDS = 30.0
_STOP_SECONDS = 60.0
_START_MARGIN_SECONDS = 60.0


class EngineHost:
    """What an engine actor does; plain Python, so that it can be used without Ray."""

    def __init__(
        self, model_path: str, settings_json: str, log_path: str, in_place: bool = False
    ) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        settings = EngineConfig.model_validate_json(settings_json)
        if settings.host == NODE_HOST:
            settings = settings.model_copy(update={"host": node_address()})
        self._server = SGLangProcess(Path(model_path), settings, Path(log_path), in_place=in_place)

    def start(self) -> str:
        """Start the server; returns its URL. Raises ComponentFailure."""
        self._server.start()
        return self._server.url

    def url(self) -> str:
        """Of the running server. Raises ComponentFailure if it has not started."""
        return self._server.url

    def alive(self) -> bool:
        """Whether the server process exists."""
        return self._server.alive()

    def stop(self) -> None:
        """End the server; nothing is left of it."""
        self._server.stop()


# Two threads: `alive` is answered while `start` waits.
EngineActor = ray.remote(max_concurrency=2, max_restarts=0)(EngineHost)


class RayEngineLauncher:
    """Starts and stops the engines of a run, each in an actor of its own (`EngineLauncher`)."""

    def __init__(self, config: RunConfig, log_directory: Path) -> None:
        self._settings = config.engines
        self._model_path = config.model.path
        self._log_directory = log_directory
        self._in_place = config.schedule.in_place
        self._actors: dict[int, Any] = {}
        self._clients: dict[int, SGLangClient] = {}
        self._launches: dict[int, int] = {}

    async def launch(self, index: int) -> SGLangClient:
        """A client of engine `index`, started anew. Raises ComponentFailure."""
        await self.stop(index)
        actor = self._make_actor(index)
        self._actors[index] = actor
        limit = self._settings.start_timeout_seconds + _START_MARGIN_SECONDS
        launches = self._launches.get(index, 0)
        self._launches[index] = launches + 1
        engine_id = f"engine{index}" if launches == 0 else f"engine{index}.{launches}"
        try:
            url = await _answer(actor.start.remote(), limit, f"the start of {engine_id}")
            client = await SGLangClient.connect(engine_id, url, self._settings)
        except EngineError as error:
            await self.stop(index)
            raise ProcessKilled(f"{engine_id} started but does not answer: {error}") from error
        except BaseException:
            await self.stop(index)
            raise
        self._clients[index] = client
        return client

    async def alive(self, index: int) -> bool:
        """Whether the server process of engine `index` exists; True while nobody can tell."""
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

    def _make_actor(self, index: int) -> Any:
        on_gpu = resolve_device(self._settings) == "cuda"
        return EngineActor.options(  # type: ignore[attr-defined]
            num_cpus=0,
            num_gpus=self._settings.tensor if on_gpu else 0,
            label_selector=NOT_ON_TRAINER_NODES,
        ).remote(
            str(self._model_path),
            self._settings.model_dump_json(),
            str((self._log_directory / f"engine{index}.log").resolve()),
            self._in_place,
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
        if isinstance(error.cause, ComponentFailure):
            raise type(error.cause)(str(error.cause)) from error
        raise
    except RayActorError as error:
        raise ProcessKilled(f"{what}: its Ray actor has died: {error}") from error
