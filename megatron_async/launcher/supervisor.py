"""Starts a whole run on this machine, watches it, shows it, and cleans up.

Processes: the rollout side, and torchrun with the trainer ranks. On several nodes the scripts in
`launch/` start both through `launcher/node.py`, and this module is not used.

Invariants
- The first failure is reported as one sentence; everything is ended before it is raised.
- Ctrl-C ends everything, loses at most the running chunks, and prints how to go on.
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
    """Run on one machine until complete; `devices` are what its trainers and its engines may use.

    Raises UserError or ComponentFailure; KeyboardInterrupt.
    """
    # It imports what `--help` and a refused config must not wait for.
    from megatron_async.launcher.rollout_side import RolloutSide, backend_of_run

    directory.pop_failure()
    with (
        backend_of_run(config, directory, gpus=devices.engines) as backend,
        closing(RolloutSide(config, directory, backend)) as rollout,
        # Ended first: they would only complain.
        trainers(config, directory, backend.address, devices.trainers) as ranks,
    ):
        progress = Progress(directory.metrics_file, config.steps, config.telemetry.progress)
        code = progress.follow(ranks.poll, rollout.status)
        if code != 0:
            directory.raise_failure(ranks.log)
            raise ranks.failure("the trainer")
        directory.pop_failure()  # torchrun's next attempt has mended what it reports


def trainers(
    config: RunConfig, directory: RunDirectory, backend: str, gpus: str | None
) -> AbstractContextManager[ChildProcess]:
    """All trainer ranks of a run, here; `gpus`: as in CUDA_VISIBLE_DEVICES, None: all."""
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
