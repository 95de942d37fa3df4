"""Controls the rollout manager of a run from another process: starts, monitors and ends it.

On one machine `launcher/supervisor.py` uses this module, on a cluster the first rollout node
(`launcher/node.py`).

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
# Additional time to stop a manager whose store is outside the run directory. The manager then
# copies the store into the run directory.
_COPY_SECONDS = 120.0


def backend_of_run(
    config: RunConfig, directory: RunDirectory, *, gpus: str | None = None
) -> AbstractContextManager[ProcessBackend]:
    """Open the process backend of a run on this machine for the duration of a `with` block.

    The backend starts processes, either as children or through Ray, depending on setting `cluster`.

    Args:
        config: The run's settings.
        directory: The run directory.
        gpus: The GPUs that engines may use, as in CUDA_VISIBLE_DEVICES; None means all.
    """
    if not uses_ray(config):
        from megatron_async.process_backends.local import local_backend

        return local_backend(directory.logs, gpus)
    from megatron_async.process_backends.on_ray import ray_backend

    return ray_backend(running_ray(config), directory.ray_token_file, gpus)


class RolloutSide:
    """Owns the rollout manager of one run, which in turn owns engines and scorers.

    The engines start in the background; `status` raises the error if their start fails.
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
            # The manager runs on this host, because the trajectory store's database is on this
            # host's disk.
            here=True,
        )

    def status(self) -> dict[str, Any]:
        """Return the manager's status; {} while no trainer is connected to the manager, and while
        the manager does not reply in time or is being restarted.

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
        """Stop the manager, which stores every received token and ends the engines. If the stop
        fails, log the failure."""
        try:
            location = location_of_writer(self._directory.store_file, self._config.store.directory)
            limit = _CALL_SECONDS + (_COPY_SECONDS if location.is_external else 0)
            self._manager.call_blocking(lambda host: host.stop(), limit=limit)
        except (ComponentFailure, UserError) as error:
            self._log(f"failed to stop the rollout manager: {error!r}")

    def _log(self, line: str) -> None:
        """Append a line to supervisor.log. If that fails, print the line, unless the manager has
        reported a failure, which is raised and is more important."""
        log = self._directory.logs / "supervisor.log"
        try:
            with log.open("a") as out:
                out.write(f"{line}\n")
        except OSError:  # For example, the disk is full.
            if not self._failure:
                print(line, file=sys.stderr)
