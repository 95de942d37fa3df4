"""Starts a whole run on this machine, watches it, shows it, and cleans up.

Processes: the rollout side, and torchrun with the trainer ranks. On several nodes the scripts in
`launch/` start both through `launcher/node.py`, and this module is not used.

Invariants
- The first failure is reported as one sentence; everything is ended before it is raised.
- Ctrl-C ends everything, loses at most the running chunks, and prints how to go on.
"""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

from megatron_async.config import RunConfig
from megatron_async.launcher.devices import DeviceSplit, running_ray
from megatron_async.launcher.environment import trainer_environment
from megatron_async.launcher.processes import Child, torchrun
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
        # It imports what `--help` and a refused config must not wait for.
        from megatron_async.launcher.rollout_side import place_of_run, rollout_side

        config, directory = self.config, self.directory
        directory.take_failure()
        with (
            place_of_run(config, directory, gpus=self.devices.engines) as place,
            rollout_side(config, directory, place) as rollout,
            self._trainers(place.address) as trainers,  # ended first: they would only complain
        ):
            progress = Progress(directory.metrics_file, config.steps, config.telemetry.progress)
            code = progress.follow(trainers.exit_code, rollout.status)
            if code != 0:
                directory.raise_failure(trainers.log_file)
                raise trainers.failure("the trainer")
            directory.take_failure()  # torchrun's next attempt has mended what it reports

    def _trainers(self, place: str) -> AbstractContextManager[Child]:
        return torchrun(
            self.config.parallel.ranks,
            "megatron_async.train_loop.rank",
            str(self.directory.path),
            log_file=self.directory.logs / "trainer.log",
            environment=trainer_environment(
                os.environ,
                one_machine=running_ray(self.config) is None,
                nvls=self.config.engines.uses_nvls,
                place=place,
                gpus=self.devices.trainers,
                hands_memory_to_engines=self.config.weights.transport == "tensor",
            ),
            max_restarts=self.config.trainer.max_restarts,
        )
