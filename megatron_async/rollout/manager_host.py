"""Runs the rollout manager in a separate process, which the process backend restarts if it dies.

Invariants
- A restarted manager gets the same arguments. The engines and scorers of the dead manager end with
  its process. The restarted manager starts new engines and scorers, and its calls fail with
  `NotAttached` until a trainer attaches.
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
    # Drop prompts that are too long, as the launcher did when it counted the prompts of an epoch.
    if config.task.long_prompts == "filter" and longest is not None:
        task.check_lengths(longest, config.sampling.max_new_tokens)
    return task


class ManagerHost:
    """Object in the manager's process that owns one `RolloutManager`. The first call starts the
    manager with its engines, and every call except `status` waits until they have started."""

    def __init__(self, config_yaml: str, run_directory: str, backend_address: str) -> None:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        self._arguments = (config_yaml, run_directory, backend_address)
        self._manager: RolloutManager | None = None
        self._starting: asyncio.Task[None] | None = None

    def _ensure_started(self) -> asyncio.Task[None]:
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
        engines.begin()  # The engines' processes start while the modules below are imported.
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
        """Start the rollout manager if needed, wait until it has started, then call the manager's
        method that `call` records and return the result."""
        with translating_disk_errors():
            # This wait is bounded, because the start of every engine has a time limit.
            await asyncio.shield(self._ensure_started())
            return await call.on(self._manager)

    async def status(self) -> dict[str, Any]:
        """Return the rollout manager's status for display; start the manager if needed, and return
        {} while it starts.

        If the start has failed, raise the error of the start.
        """
        if self._ensure_started().done():
            with translating_disk_errors():
                self._ensure_started().result()
        return {} if self._manager is None else self._manager.status()

    async def stop(self) -> None:
        """Stop the rollout manager, after waiting until it has started."""
        await self.on_manager(recorded(lambda manager: manager.stop()))
