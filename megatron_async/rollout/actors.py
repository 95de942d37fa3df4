"""The rollout side as Ray actors: one manager, one actor for each engine, verifier workers.

The classes themselves know nothing of Ray; this module is the only edge where they meet it.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Final

import ray

NAMESPACE: Final = "megatron_async"
MANAGER_NAME: Final = "rollout_manager"


@ray.remote(max_concurrency=64, num_cpus=0)
class ManagerActor:
    """`RolloutManager` in a process of its own. Errors reach the caller as they are."""

    def __init__(
        self,
        config_yaml: str,
        run_directory: str,
    ) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._arguments = (config_yaml, run_directory)
        self._manager: Any = None
        self._ready = asyncio.Event()
        self._start_error: Exception | None = None

    async def start(self) -> None:
        """Start the engines; calls that came earlier wait for it."""
        try:
            await self._start()
        except Exception as error:
            self._start_error = error
            raise
        finally:
            self._ready.set()

    async def _start(self) -> None:
        import yaml

        from megatron_async.config import RunConfig
        from megatron_async.rollout.engine_actor import RayEngineLauncher
        from megatron_async.rollout.manager import RolloutManager
        from megatron_async.run.directory import RunDirectory
        from megatron_async.tasks import build_task
        from megatron_async.tasks.verifier import RayVerifierPool

        config_yaml, run_directory = self._arguments
        config = RunConfig.model_validate(yaml.safe_load(config_yaml))
        directory = RunDirectory(Path(run_directory))
        task = build_task(config.task, config.model.path)
        self._manager = RolloutManager(
            config,
            task=task,
            verifier=RayVerifierPool(config.task, config.model.path),
            launcher=RayEngineLauncher(config, directory.logs),
            store_file=directory.store_file,
            events_directory=directory.events if config.telemetry.record_events else None,
        )
        await self._manager.start()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Any method of the manager, once it has started."""
        await self._ready.wait()  # bounded: start() is, and the caller has a limit of its own
        if self._start_error is not None:
            raise self._start_error
        result = getattr(self._manager, method)(*arguments)
        return await result if hasattr(result, "__await__") else result

    def status(self) -> dict[str, Any]:
        """The manager's status; empty until it has started."""
        return {} if self._manager is None else self._manager.status()  # type: ignore[no-any-return]
