"""The rollout side as Ray actors: one manager, one actor for each engine, scorer workers.

The classes themselves know nothing of Ray; this module is the only edge where they meet it.

Invariants
- Ray starts a manager that has died again, with the same arguments. Engines and scorers are owned
  by their manager and end with it; the new one starts its own, and has no trainer attached.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any, Final

import ray

from megatron_async.files.disk import naming_disk_errors
from megatron_async.runtime.garbage_collection import search_rarely

NAMESPACE: Final = "megatron_async"
MANAGER_NAME: Final = "rollout_manager"


@ray.remote(max_concurrency=64, num_cpus=0)
class ManagerActor:
    """`RolloutManager` in a process of its own. Errors reach the caller as they are."""

    def __init__(self, config_yaml: str, run_directory: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._arguments = (config_yaml, run_directory)
        self._manager: Any = None
        self._starting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the engines, once; calls that came earlier wait for it.

        Any call starts them: after a restart by Ray nobody calls `start` again.
        """
        await asyncio.shield(self._begin())  # bounded: every engine's start is

    def _begin(self) -> asyncio.Task[None]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return self._starting

    async def _start(self) -> None:
        import yaml

        from megatron_async.config import build_config
        from megatron_async.engines.actor import RayEngineLauncher
        from megatron_async.engines.nodes import NOT_ON_TRAINER_NODES
        from megatron_async.rollout.fleet import EngineLauncher
        from megatron_async.rollout.manager import RolloutManager
        from megatron_async.rollout.prompt_lengths import longest_tokens
        from megatron_async.run_directory import RunDirectory
        from megatron_async.runtime.import_path import load_object
        from megatron_async.scoring.workers import RayScorerPool
        from megatron_async.tasks import build_task

        config_yaml, run_directory = self._arguments
        config = build_config(yaml.safe_load(config_yaml))
        directory = RunDirectory(Path(run_directory))
        task = build_task(config.task, config.model.path, config.eval)
        longest = longest_tokens(config)
        if config.task.filter_overlong and longest is not None:  # as the start has counted
            task.check_lengths(longest, config.sampling.max_new_tokens)
        launcher: EngineLauncher = RayEngineLauncher(config, directory.logs)
        if config.experiment.ledger is not None:
            ledger = load_object(config.experiment.ledger, "experiment.ledger")
            launcher = ledger(directory.path).launcher(launcher)
        self._manager = RolloutManager(
            config,
            task=task,
            scorers=RayScorerPool(
                config.scorers.logging_to(directory.logs), config.model.path, NOT_ON_TRAINER_NODES
            ),
            launcher=launcher,
            store_file=directory.store_file,
            events_directory=directory.events if config.telemetry.record_events else None,
        )
        await self._manager.start()
        search_rarely()

    async def call(self, method: str, *arguments: Any) -> Any:
        """Any call of the trainer, once the manager has started."""
        with naming_disk_errors():
            await self.start()
            return await getattr(self._manager, method)(*arguments)

    async def status(self) -> dict[str, Any]:
        """The manager's status; empty until it has started. Raises what its start raised."""
        if self._begin().done():
            with naming_disk_errors():
                self._begin().result()
        return {} if self._manager is None else self._manager.status()  # type: ignore[no-any-return]
