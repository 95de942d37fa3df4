"""Runs a whole training in one process, with one trainer rank, on engines that the caller has
started.

It is meant for tests and experiments with many short trainings on one running engine. The rollout
manager, the trainer and the training loop are the same code as in a large run; only the separate
processes are missing.

Invariants
- The rollout manager runs on the event loop of another thread. Every call to that thread has a time
  limit.
- This module never starts, restarts or stops an engine.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

from megatron_async.checkpoint.manager import CheckpointManager
from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineClient
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.errors import ComponentFailure
from megatron_async.process_backends.backend import R
from megatron_async.rollout.manager import RolloutManager
from megatron_async.rollout.messages import ResumePoint
from megatron_async.run_directory import RunDirectory
from megatron_async.runtime.blocking import blocking
from megatron_async.scoring.interface import Scorers
from megatron_async.tasks import build_task
from megatron_async.telemetry.metrics import MetricsWriter
from megatron_async.train_loop.loop import TrainLoop
from megatron_async.train_loop.manager_client import RolloutLink
from megatron_async.trainer.offload import trainer_memory
from megatron_async.trainer.parallel import parallel_session
from megatron_async.trainer.step import PolicyTrainer
from megatron_async.weight_sync.publisher import WeightPublisher

_CALL_SECONDS = 120.0


class BorrowedEngines:
    """An `EngineLauncher` that connects to running engines and neither starts nor stops them."""

    def __init__(self, config: RunConfig, urls: Sequence[str]) -> None:
        self._config = config
        self._urls = urls

    async def launch(self, index: int) -> EngineClient:
        return await SGLangClient.connect(f"engine{index}", self._urls[index], self._config.engines)

    async def alive(self, index: int) -> bool:
        return True

    async def stop(self, index: int) -> None:
        return None


class LocalLink(RolloutLink):
    """Calls of the training loop to a rollout manager on another thread of this process."""

    def __init__(self, config: RunConfig, manager: RolloutManager) -> None:
        super().__init__(config)
        self._manager = manager

    def __enter__(self) -> "LocalLink":
        self._wait(self._manager.start())
        return self

    def __exit__(self, *_: object) -> None:
        self._wait(self._manager.stop())

    def attach(self, resume: ResumePoint) -> None:
        self._lineage = resume.lineage
        self._wait(self._manager.attach(resume))

    def _call(
        self,
        call: Callable[[RolloutManager, int], Awaitable[R]],
        limit: float,
        unless_stopped: bool = False,
    ) -> R:
        return self._wait(call(self._manager, self._lineage), limit)

    def _wait(self, work: Awaitable[R], limit: float = _CALL_SECONDS) -> R:
        try:
            return blocking(asyncio.wait_for(work, limit))
        except TimeoutError as error:
            raise ComponentFailure(
                f"the rollout manager did not reply within {limit:g} s"
            ) from error


def train_locally(
    config: RunConfig,
    directory: RunDirectory,
    urls: Sequence[str],
    scorers: Scorers,
    environments: EnvironmentWorkers | None = None,
) -> None:
    """Run all training steps of `config` in this process.

    An exception in the trainer or in the rollout manager propagates to the caller with its
    traceback.

    Args:
        config: The run's settings.
        directory: The run directory.
        urls: Addresses of running engines, whose model has the architecture of `model.path`.
        scorers: The scorers of responses.
        environments: Workers of the environment, if `config` names one.
    """
    manager = RolloutManager(
        config,
        task=build_task(
            config.task, config.model.path, config.eval, has_episodes=config.has_episodes
        ),
        scorers=scorers,
        launcher=BorrowedEngines(config, urls),
        store_file=directory.store_file,
        events_directory=directory.events if config.telemetry.record_events else None,
        environments=environments,
    )
    with ExitStack() as stack:
        stack.enter_context(parallel_session(config.parallel, config.trainer, config.seed))
        lineage = directory.next_lineage()
        trainer = PolicyTrainer(config, lineage=lineage)
        link = stack.enter_context(LocalLink(config, manager))
        resume = ResumePoint(lineage, trainer.step)
        link.attach(resume)
        where = directory.weights_directory(config.weights.directory)
        publisher = WeightPublisher(config, trainer.model, where)
        stack.callback(publisher.close)
        metrics = stack.enter_context(MetricsWriter(directory.metrics_file, lineage=lineage))
        checkpoints = CheckpointManager(directory.checkpoints, config.checkpoint)
        memory = trainer_memory(config, trainer)
        TrainLoop(
            config=config,
            trainer=trainer,
            publisher=publisher,
            checkpoints=checkpoints,
            link=link,
            metrics=metrics,
            resume=resume,
            memory=memory,
        ).run()
