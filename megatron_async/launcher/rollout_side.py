"""The rollout side of a run, held from outside: create its manager actor, look after it, end it.

Used by the one-machine supervisor and by the rollout role of a cluster launch. This process is
connected to the Ray cluster in which the manager, the engines and the scorers live.

Invariants
- A failure that the manager reports is raised here as it is: UserError or ComponentFailure.
- Every call has a time limit; a manager that is slow for a moment, or that Ray is starting again,
  is not a failure.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.exceptions import (
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_async.config import RunConfig, dump
from megatron_async.engines.nodes import init_ray, ray_directory, use_ray_token
from megatron_async.errors import ComponentFailure, UserError, one_line
from megatron_async.launcher.devices import VISIBLE_VARIABLE
from megatron_async.rollout.actors import MANAGER_NAME, NAMESPACE, ManagerActor
from megatron_async.run_directory import RunDirectory, write_atomically
from megatron_async.store.place import place_of_writer

_CALL_SECONDS = 20.0
# To stop a manager whose store is outside the run directory, which leaves a copy of all of it.
_COPY_SECONDS = 120.0


def make_ray_token(file: Path) -> None:
    """Make a token for this user alone; a Ray that this process starts answers only to it."""
    write_atomically(file, secrets.token_hex(32), private=True)
    use_ray_token(file)
    Config.initialize("")  # Ray read its environment when it was imported
    AuthenticationTokenLoader.instance().reset_cache()  # of an earlier Ray of this process


def start_ray(token_file: Path, *, gpus: str | None = None) -> str:
    """Start a Ray cluster on this machine and return its address.

    Ray listens on every interface, whatever address it is given: only who can read `token_file`,
    which is made here, can use it. `gpus`: what the cluster may hand out, as in
    CUDA_VISIBLE_DEVICES; None: all that there are.
    """
    make_ray_token(token_file)
    # Not None: Ray would join whatever cluster `ray start` left a note of on this machine.
    own: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(ray_directory()),
        # By default Ray's workers, and so the engines, give way to every other process.
        "_system_config": {"worker_niceness": 0},
    }
    if gpus is not None:
        own["num_gpus"] = len(gpus.split(","))
    with _visible(gpus):
        return _connect(own)


def _connect(arguments: dict[str, Any]) -> str:
    context = init_ray(
        **arguments,
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level="error",
        configure_logging=True,
    )
    return str(context.address_info["gcs_address"])


@contextmanager
def _visible(gpus: str | None) -> Iterator[None]:
    """Ray's processes inherit it when they start; this process keeps what it had."""
    before = os.environ.get(VISIBLE_VARIABLE)
    if gpus is not None:
        os.environ[VISIBLE_VARIABLE] = gpus
    try:
        yield
    finally:
        if gpus is not None:
            del os.environ[VISIBLE_VARIABLE]
            if before is not None:
                os.environ[VISIBLE_VARIABLE] = before


@contextmanager
def rollout_side(
    config: RunConfig,
    directory: RunDirectory,
    ray_address: str | None,
    *,
    gpus: str | None = None,
) -> Iterator[tuple[RolloutSide, str]]:
    """A rollout side to be started, ended with the block.

    It is in the Ray cluster at `ray_address` (None: one of its own, as in `start_ray`).
    """
    if ray_address is None:
        address = start_ray(directory.ray_token_file, gpus=gpus)
    else:
        address = _connect({"address": ray_address})
    side = RolloutSide(config, directory)
    try:
        yield side, address
    finally:
        try:
            side.stop()
        finally:
            ray.shutdown()
            directory.ray_token_file.unlink(missing_ok=True)


class RolloutSide:
    """Manager, engines and scorers of one run."""

    def __init__(self, config: RunConfig, directory: RunDirectory) -> None:
        self._config = config
        self._directory = directory
        self._manager: Any = None
        self._failure = ""

    def start(self) -> None:
        """Create the manager; engines start in the background (`status` reports how that went)."""
        self._manager = ManagerActor.options(  # type: ignore[attr-defined]
            name=MANAGER_NAME,
            # This node, always: the database of the trajectory store is on its disk.
            scheduling_strategy=NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            ),
            max_restarts=self._config.engines.max_manager_restarts,
        ).remote(dump(self._config), str(self._directory.path))
        self._manager.start.remote()

    def status(self) -> dict[str, Any]:
        """The manager's status; {} before a trainer has attached, or when it is slow or restarting.

        Raises UserError or ComponentFailure when the rollout side has failed.
        """
        try:
            status: dict[str, Any] = ray.get(self._manager.status.remote(), timeout=_CALL_SECONDS)
        except RayTaskError as error:
            if isinstance(error.cause, UserError | ComponentFailure):
                raise type(error.cause)(str(error.cause)) from error
            log = self._log(f"the rollout manager failed: {error}")
            raise ComponentFailure(
                f"the rollout manager failed: {one_line(error.cause)}; its traceback is in {log}"
            ) from error
        except ActorUnavailableError as error:
            self._log(f"the rollout manager is restarted: {error}")
            return {}
        except RayActorError as error:
            log = self._log(f"the rollout manager has died: {error}")
            raise ComponentFailure(
                "the rollout manager has died (engines.max_manager_restarts is "
                f"{self._config.engines.max_manager_restarts}); Ray's account of it is in {log}, "
                f"its output in {ray_directory()}/session_latest/logs"
            ) from error
        except GetTimeoutError:
            return {}
        if status.get("failure"):
            self._failure = status["failure"]
            raise ComponentFailure(status["failure"])
        return status

    def stop(self) -> None:
        """Keep every token, end the engines. What goes wrong on the way goes to the log."""
        if self._manager is None:
            return
        try:
            place = place_of_writer(self._directory.store_file, self._config.store.directory)
            limit = _CALL_SECONDS + (_COPY_SECONDS if place.away else 0)
            ray.get(self._manager.call.remote("stop"), timeout=limit)
        except (RayError, ComponentFailure, UserError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            self._log(f"stopping the rollout manager: {cause!r}")

    def _log(self, line: str) -> Path:
        log = self._directory.logs / "supervisor.log"
        try:
            with log.open("a") as out:
                out.write(f"{line}\n")
        except OSError:  # a full disk must not hide the failure that is about to be raised
            if not self._failure:
                print(line, file=sys.stderr)
        return log
