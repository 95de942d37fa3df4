"""Runs a whole training run on this machine: starts its processes, shows progress, and cleans up.

The processes are the rollout manager with its engines and scorers, and torchrun with the trainer
ranks. A launch over several nodes does not use this module: the scripts in `launch/` start
`launcher/node.py` on each node.

Invariants
- The first failure is reported in one message, after all processes have been ended.
- Ctrl-C ends everything, loses at most the chunks that are being generated, and prints how to
  resume the run.
"""

import os
from contextlib import AbstractContextManager, closing

from megatron_async.config import RunConfig
from megatron_async.launcher.devices import DeviceSplit, running_ray
from megatron_async.launcher.environment import trainer_environment
from megatron_async.launcher.processes import torchrun
from megatron_async.process_backends.child_process import ChildProcess
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.progress import Progress


def supervise(config: RunConfig, directory: RunDirectory, devices: DeviceSplit) -> None:
    """Run `config` on this machine until it is complete.

    Args:
        config: The run's settings.
        directory: The run directory.
        devices: The GPUs for the trainer ranks and those for the engines.

    Raises:
        UserError: Bad input, found by a rank or the rollout side.
        ComponentFailure: A process failed.
        KeyboardInterrupt: The user pressed Ctrl-C.
    """
    # The import is slow. Here it does not delay `--help` or the refusal of a configuration.
    from megatron_async.launcher.rollout_side import RolloutSide, backend_of_run

    directory.pop_failure()
    with (
        backend_of_run(config, directory, gpus=devices.engines) as backend,
        closing(RolloutSide(config, directory, backend)) as rollout,
        # This is the last of the three, so it is ended first. Otherwise the trainer ranks would
        # lose the rollout side and report that as a failure.
        trainers(config, directory, backend.address, devices.trainers) as ranks,
    ):
        progress = Progress(directory.metrics_file, config.steps, config.telemetry.progress)
        code = progress.follow(ranks.poll, rollout.status)
        if code != 0:
            directory.raise_failure(ranks.log)
            raise ranks.failure("the trainer")
        # The run directory may still have a failure from which the ranks recovered by a restart.
        directory.pop_failure()


def trainers(
    config: RunConfig, directory: RunDirectory, backend: str, gpus: str | None
) -> AbstractContextManager[ChildProcess]:
    """Start all trainer ranks of a run on this machine.

    `gpus` are the GPUs for the ranks, as in CUDA_VISIBLE_DEVICES; None means all.
    """
    return torchrun(
        config.parallel.ranks,
        "megatron_async.train_loop.rank",
        str(directory.path),
        log_file=directory.logs / "trainer.log",
        environment=trainer_environment(
            os.environ,
            one_machine=running_ray(config) is None,
            nvls=config.engines.uses_nvls,
            backend=backend,
            gpus=gpus,
            hands_memory_to_engines=config.weights.transport == "tensor",
            first_lineage=str(directory.lineages_so_far()),
        ),
        max_restarts=config.trainer.max_restarts,
    )
