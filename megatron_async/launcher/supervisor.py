"""Starts a whole run on this machine, watches it, shows it, and cleans up.

Processes: a local Ray with the rollout side, and torchrun with the trainer ranks. On several nodes
the scripts in `launch/` start both through `launcher/node.py`, and this module is not used.

Invariants
- The first failure is reported as one sentence; everything is ended before it is raised.
- Ctrl-C ends everything, loses at most the running chunks, and prints how to go on.
"""

import os
from dataclasses import dataclass

from megatron_async.config import RunConfig
from megatron_async.launcher.devices import RUNNING_RAY_VARIABLE, DeviceSplit
from megatron_async.launcher.environment import trainer_environment
from megatron_async.launcher.processes import Child, start_torchrun
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.progress import Progress


@dataclass(frozen=True)
class Supervisor:
    """A run on one machine; `devices` are what its trainers and its engines may use."""

    config: RunConfig
    directory: RunDirectory
    devices: DeviceSplit

    def run(self) -> None:
        """Run until complete. Raises UserError or ComponentFailure; KeyboardInterrupt."""
        # It imports Ray, which `--help` and a refused config must not wait for.
        from megatron_async.launcher.rollout_side import rollout_side

        config, directory = self.config, self.directory
        directory.take_failure()
        running = os.environ.get(RUNNING_RAY_VARIABLE)
        gpus = self.devices.engines
        with rollout_side(config, directory, running, gpus=gpus) as (rollout, address):
            rollout.start()
            trainers = self._start_trainers(address)
            try:
                progress = Progress(directory.metrics_file, config.steps, config.telemetry.progress)
                code = progress.follow(trainers.exit_code, rollout.status)
                if code != 0:
                    directory.raise_failure(trainers.log_file)
                    raise trainers.failure("the trainer")
                directory.take_failure()  # torchrun's next attempt has mended what it reports
            finally:
                trainers.stop()  # before engines and store: they would only complain

    def _start_trainers(self, ray_address: str) -> Child:
        return start_torchrun(
            self.config.parallel.ranks,
            "megatron_async.train_loop.rank",
            str(self.directory.path),
            log_file=self.directory.logs / "trainer.log",
            environment=trainer_environment(
                os.environ,
                one_machine=not os.environ.get(RUNNING_RAY_VARIABLE),
                nvls=self.config.engines.uses_nvls,
                ray_address=ray_address,
                gpus=self.devices.trainers,
                hands_memory_to_engines=self.config.weights.transport == "tensor",
            ),
            max_restarts=self.config.trainer.max_restarts,
        )
