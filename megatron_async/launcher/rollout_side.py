"""Controls the rollout side of a run from another process: starts, monitors and ends its manager.

The one-machine supervisor and the rollout role of a cluster launch use it.

Invariants
- A failure that the manager reports is raised here unchanged: UserError or ComponentFailure.
- Every call has a time limit. A manager that is briefly slow, or that is being restarted, is not a
  failure.
"""

import sys
from contextlib import AbstractContextManager
from typing import Any

from megatron_async.config import RunConfig, dump
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.launcher.devices import running_ray, uses_ray
from megatron_async.process_backends.backend import (
    CallTimeout,
    ProcessBackend,
    RemoteObject,
    RemoteObjectDead,
    RemoteObjectLost,
)
from megatron_async.rollout.manager_host import MANAGER_NAME, ManagerHost
from megatron_async.run_directory import RunDirectory
from megatron_async.store.location import location_of_writer

_CALL_SECONDS = 20.0
# Limit for stopping a manager whose store is outside the run directory, which copies the store.
_COPY_SECONDS = 120.0


def backend_of_run(
    config: RunConfig, directory: RunDirectory, *, gpus: str | None = None
) -> AbstractContextManager[ProcessBackend]:
    """Open the process backend of a run on this machine, chosen by `cluster`; close it with the
    block.

    `gpus` are the GPUs that engines may use, as in CUDA_VISIBLE_DEVICES; None means all.
    """
    if not uses_ray(config):
        from megatron_async.process_backends.local import local_backend

        return local_backend(directory.logs, gpus)
    from megatron_async.process_backends.on_ray import ray_backend

    return ray_backend(running_ray(config), directory.ray_token_file, gpus)


class RolloutSide:
    """Owns the rollout manager of one run, which in turn owns engines and scorers.

    The engines start in the background; `status` reports a failure of their start.
    """

    def __init__(self, config: RunConfig, directory: RunDirectory, backend: ProcessBackend) -> None:
        self._config = config
        self._directory = directory
        self._failure = ""
        self._manager: RemoteObject[ManagerHost] = backend.start(
            ManagerHost,
            dump(config),
            str(directory.path),
            backend.address,
            name=MANAGER_NAME,
            restarts=config.engines.max_restarts,
            # On this host, because the database of the trajectory store is on its disk.
            here=True,
        )

    def status(self) -> dict[str, Any]:
        """Return the manager's status; {} while no trainer is attached or the manager is slow or
        restarting.

        Raises:
            UserError: The run directory is missing.
            ComponentFailure: The rollout side has failed.
        """
        self._directory.check_exists()
        try:
            status = self._manager.call_blocking(lambda host: host.status(), limit=_CALL_SECONDS)
        except CallTimeout:
            return {}
        except RemoteObjectDead as error:
            self._log(str(error))
            raise ComponentFailure(
                f"{error} (engines.max_restarts is {self._config.engines.max_restarts})"
            ) from error
        except RemoteObjectLost as error:
            self._log(f"the rollout manager is being restarted: {error}")
            return {}
        if status.get("failure"):
            self._failure = status["failure"]
            raise ComponentFailure(status["failure"])
        return status

    def close(self) -> None:
        """Stop the manager, so that it stores every token and ends the engines; log failures of the
        stop."""
        try:
            location = location_of_writer(self._directory.store_file, self._config.store.directory)
            limit = _CALL_SECONDS + (_COPY_SECONDS if location.is_external else 0)
            self._manager.call_blocking(lambda host: host.stop(), limit=limit)
        except (ComponentFailure, UserError) as error:
            self._log(f"failed to stop the rollout manager: {error!r}")

    def _log(self, line: str) -> None:
        """Append a line to supervisor.log; if that fails, print it, unless a failure is about to be
        raised."""
        log = self._directory.logs / "supervisor.log"
        try:
            with log.open("a") as out:
                out.write(f"{line}\n")
        except OSError:  # a full disk must not hide the failure that is about to be raised
            if not self._failure:
                print(line, file=sys.stderr)
