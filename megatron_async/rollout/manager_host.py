"""The rollout manager in a process of its own, which the place starts again when it dies.

Invariants
- A manager that was started again has the same arguments. Engines and scorers are owned by their
  manager and end with it; the new one starts its own, and has no trainer attached.
"""

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from megatron_async.config import RunConfig
from megatron_async.files.disk import translating_disk_errors
from megatron_async.process_backends.backend import MethodCall, recorded
from megatron_async.runtime.garbage_collection import tune_gc
from megatron_async.tasks.base import Task

if TYPE_CHECKING:
    from megatron_async.rollout.manager import RolloutManager

MANAGER_NAME: Final = "rollout-manager"


def _task_of(config: RunConfig) -> Task:
    from megatron_async.rollout.prompt_lengths import max_sequence_tokens
    from megatron_async.tasks import build_task

    task = build_task(config.task, config.model.path, config.eval, has_episodes=config.has_episodes)
    longest = max_sequence_tokens(config)
    if config.task.long_prompts == "filter" and longest is not None:  # as the start has counted
        task.check_lengths(longest, config.sampling.max_new_tokens)
    return task


class ManagerHost:
    """`RolloutManager`, with its engines, started by the first call; others wait for it."""

    def __init__(self, config_yaml: str, run_directory: str, backend_address: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._arguments = (config_yaml, run_directory, backend_address)
        self._manager: RolloutManager | None = None
        self._starting: asyncio.Task[None] | None = None

    def _begin(self) -> asyncio.Task[None]:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return self._starting

    async def _start(self) -> None:
        import yaml

        from megatron_async.config import build_config
        from megatron_async.engines.host import HostedEngines
        from megatron_async.process_backends.addresses import connect_backend
        from megatron_async.run_directory import RunDirectory

        config_yaml, run_directory, backend_address = self._arguments
        config = build_config(yaml.safe_load(config_yaml))
        directory = RunDirectory(Path(run_directory))
        backend = connect_backend(backend_address, directory.logs)
        engines = HostedEngines(config, directory.logs, backend)
        engines.begin()  # beside all that is imported from here on
        task = await asyncio.to_thread(_task_of, config)

        from megatron_async.environments.workers import EnvironmentWorkers
        from megatron_async.rollout.manager import RolloutManager
        from megatron_async.scoring.interface import NoScorers, Scorers
        from megatron_async.scoring.pool import scorer_pool

        scorers: Scorers = NoScorers()
        if config.scores:
            settings = config.scorers.logging_to(directory.logs)
            scorers = scorer_pool(settings, config.model.path, backend)
        environments = EnvironmentWorkers(config, backend) if config.has_episodes else None
        self._manager = RolloutManager(
            config,
            task=task,
            scorers=scorers,
            environments=environments,
            launcher=engines,
            store_file=directory.store_file,
            events_directory=directory.events if config.telemetry.record_events else None,
        )
        await self._manager.start()
        tune_gc()

    async def on_manager(self, call: MethodCall) -> Any:
        """Make a call of the manager, once it has started."""
        with translating_disk_errors():
            await asyncio.shield(self._begin())  # bounded: every engine's start is
            return await call.on(self._manager)

    async def status(self) -> dict[str, Any]:
        """The manager's status; empty until it has started. Raises what its start raised."""
        if self._begin().done():
            with translating_disk_errors():
                self._begin().result()
        return {} if self._manager is None else self._manager.status()

    async def stop(self) -> None:
        """Stop the manager, once it has started."""
        await self.on_manager(recorded(lambda manager: manager.stop()))
