"""Starts a run's own Ray cluster with a private token, and joins existing clusters.

Invariants
- A cluster that this module starts accepts only processes that can read its token.
- A failed start is retried once. If the retry fails too, the error message contains the last line
  of Ray's log.
- Ray's files of runs that have ended are removed at the next start, except the newest ones.
"""

import os
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil
import ray
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]
from ray.job_config import JobConfig

from megatron_async.errors import ComponentFailure, one_line
from megatron_async.files.bounded_log import LOG_BYTES
from megatron_async.files.private_directory import user_directory
from megatron_async.process_backends.local import VISIBLE_VARIABLE
from megatron_async.run_directory import write_atomically

NAMESPACE: Final = "megatron_async"
_STARTS: Final = 2


def use_ray_token(file: Path) -> None:
    """Make Ray use the token in `file` in this process and in Ray processes that it starts.

    Ray then presents this token to other processes, and accepts only processes with this token.
    """
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Without rotation, the output of the user's code could fill the disk.
    os.environ.setdefault("RAY_ROTATION_MAX_BYTES", str(LOG_BYTES))
    os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")
    Config.initialize("")  # Ray has read its environment when it was imported, so read it again.
    # Drop the token of an earlier Ray cluster of this process.
    AuthenticationTokenLoader.instance().reset_cache()


def make_ray_token(file: Path) -> None:
    """Write a new token to `file`, which only this user can read, and make Ray use the token."""
    write_atomically(file, secrets.token_hex(32), private=True)
    use_ray_token(file)


def ray_directory() -> Path:
    """Return the directory of Ray's sockets and logs on this node, which only this user can access.

    When Ray starts, it makes its directory accessible to everyone, so that directory is inside a
    private one. Ray's default directory is not used, because all users of a machine share it: a
    second user cannot start Ray there, and all users can access each other's sockets.

    Raises:
        UserError: Another user created the directory.
    """
    return user_directory("ray") / "ray"


def start_ray(token_file: Path, gpus: str | None = None) -> str:
    """Start a Ray cluster on this machine, join it, and return its address.

    Ray listens on every network interface, whatever address it gets. Only processes that can read
    the token can use the cluster.

    Args:
        token_file: File that gets a new token.
        gpus: GPUs of the cluster, in the form of CUDA_VISIBLE_DEVICES; None for all GPUs.

    Raises:
        ComponentFailure: Ray did not start in two attempts.
    """
    make_ray_token(token_file)
    _remove_dead_sessions(ray_directory())
    # The address "local" starts a new cluster. Without an address, Ray would join a cluster that
    # anyone has started on this machine with `ray start`.
    arguments: dict[str, Any] = {
        "address": "local",
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
        "_temp_dir": str(ray_directory()),
        # By default, Ray runs its workers, which include the engines, at a lower CPU priority.
        "_system_config": {"worker_niceness": 0},
    }
    if gpus is not None:
        arguments["num_gpus"] = len(gpus.split(","))
    with _visible(gpus):
        for remaining in reversed(range(_STARTS)):
            try:
                return _init(arguments)
            except Exception as error:  # Ray raises a plain Exception if a start takes too long.
                ray.shutdown()  # Ends processes of the failed start.
                if not remaining:
                    raise ComponentFailure(
                        f"Ray did not start in {_STARTS} attempts ({one_line(error)}): "
                        f"{_last_log_line()}"
                    ) from error
    raise AssertionError


def join_ray(address: str) -> None:
    """Connect this process to the Ray cluster at `address`, unless it is connected to a cluster.

    Raises:
        ComponentFailure: The cluster cannot be joined.
    """
    if ray.is_initialized():
        return
    try:
        _init({"address": address})
    except Exception as error:  # Ray raises a plain Exception if joining takes too long.
        ray.shutdown()
        raise ComponentFailure(
            f"the Ray cluster at {address} cannot be joined from {socket.gethostname()} "
            f"({one_line(error)}). Check that the cluster runs and is reachable from this node."
        ) from error


def _init(arguments: dict[str, Any]) -> str:
    """Call `ray.init` with `arguments`, and return the address of the cluster.

    This process keeps its SIGTERM handler, because Ray's handler would print its C++ stack. Ray is
    also kept from printing the traceback of a call that fails before its reply is awaited, because
    the caller reports that failure by a one-line message.
    """
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    # Pretend to be a job of Ray's client. For any other job, Ray puts this process's working
    # directory first on the import path of the workers, where a file could replace a module.
    arguments["job_config"] = JobConfig(ray_namespace=NAMESPACE, _client_job=True)
    context = ray.init(**arguments, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)
    return str(context.address_info["gcs_address"])


@contextmanager
def _visible(gpus: str | None) -> Iterator[None]:
    """Set CUDA_VISIBLE_DEVICES to `gpus` during the block, so that Ray's processes inherit it.

    With None, nothing is changed.
    """
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


def _last_log_line() -> str:
    """Return a phrase with the last line of the newest log of the Ray that this process started."""
    sessions = sorted(ray_directory().glob(f"session_*_{os.getpid()}"))
    logs = [log for log in sessions[-1].glob("logs/*") if log.is_file()] if sessions else []
    for log in sorted(logs, key=lambda file: file.stat().st_mtime, reverse=True):
        lines = log.read_text(errors="replace").split("\n")
        if last := next((line.strip() for line in reversed(lines) if line.strip()), ""):
            return f"its last line is {last[:300]!r} ({log})"
    return f"there is no log in {ray_directory()}"


def _remove_dead_sessions(directory: Path) -> None:
    """Remove the session folders of Ray clusters that no longer run, except the newest folder.

    The newest folder may explain why its cluster ended.
    """
    sessions = sorted(path for path in directory.glob("session_*") if not path.is_symlink())
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    for session in sessions[:-1]:
        if not any(session.name in line for line in lines):
            shutil.rmtree(session, ignore_errors=True)
