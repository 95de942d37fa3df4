"""Starts a whole run on this machine, watches it, shows it, and cleans up.

Processes: a local Ray with the rollout side, and torchrun with the trainer ranks. On several nodes
the scripts in `launch/` start both through `launcher/node.py`, and this module is not used.

Invariants
- The first failure is reported as one sentence; everything is ended before it is raised.
- Ctrl-C ends everything, loses at most the running chunks, and prints how to go on.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from megatron_async.config import RunConfig
from megatron_async.launcher.devices import RUNNING_RAY_VARIABLE, DeviceSplit
from megatron_async.launcher.environment import trainer_environment
from megatron_async.launcher.processes import Child, start_torchrun
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.progress import Progress

if TYPE_CHECKING:  # It imports Ray, which `--help` and a refused config must not wait for.
    from megatron_async.launcher.rollout_side import RolloutSide

_POLL_SECONDS = 0.5


class Supervisor:
    """A run on one machine; `devices` are what its trainers and its engines may use."""

    def __init__(self, config: RunConfig, directory: RunDirectory, devices: DeviceSplit) -> None:
        self._config = config
        self._directory = directory
        self._devices = devices
        self._trainers: Child | None = None
        self._rollout: RolloutSide | None = None

    def run(self) -> None:
        """Run until complete. Raises UserError or ComponentFailure; KeyboardInterrupt."""
        import ray

        from megatron_async.launcher.rollout_side import RolloutSide, connect_ray

        self._directory.take_failure()
        running = os.environ.get(RUNNING_RAY_VARIABLE)
        address = connect_ray(running, gpus=self._devices.engines)
        try:
            self._rollout = RolloutSide(self._config, self._directory)
            self._rollout.start()
            self._trainers = self._start_trainers(address, self._devices.trainers)
            self._watch(self._rollout)
        finally:
            self._stop()
            ray.shutdown()

    def _start_trainers(self, ray_address: str, gpus: str | None) -> Child:
        return start_torchrun(
            self._config.parallel.ranks,
            "megatron_async.train_loop.rank",
            str(self._directory.path),
            log_file=self._directory.logs / "trainer.log",
            environment=trainer_environment(
                os.environ,
                one_machine=not os.environ.get(RUNNING_RAY_VARIABLE),
                ray_address=ray_address,
                gpus=gpus,
                hands_memory_to_engines=self._config.weights.transport == "tensor",
            ),
            max_restarts=self._config.trainer.max_restarts,
        )

    def _watch(self, rollout: RolloutSide) -> None:
        assert self._trainers is not None
        progress = Progress(
            self._directory.metrics_file, self._config.steps, self._config.telemetry.progress
        )
        with progress:
            while (code := self._trainers.exit_code()) is None:
                progress.update(rollout.status())
                time.sleep(_POLL_SECONDS)
            progress.update(None)
        if code == 0:
            self._directory.take_failure()  # torchrun's next attempt has mended what it reports
            return
        self._directory.raise_failure(self._trainers.log_file)
        raise self._trainers.failure("the trainer")

    def _stop(self) -> None:
        """Trainers first (they would only complain), then engines and the store."""
        if self._trainers is not None:
            self._trainers.stop()
        if self._rollout is not None:
            self._rollout.stop()
