"""A Ray cluster of the run's own, its key and its files; and how a process joins one.

Invariants
- A cluster that is made here answers only to who can read its token.
- A start that fails is tried once more; what then fails is one sentence with the end of Ray's log.
- Ray's files of runs that have ended are removed at the next start.
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
    """Have Ray's processes from here on show the token in `file`, and answer to no other."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # What the user's code prints would fill the disk otherwise.
    os.environ.setdefault("RAY_ROTATION_MAX_BYTES", str(LOG_BYTES))
    os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")
    Config.initialize("")  # Ray read its environment when it was imported
    AuthenticationTokenLoader.instance().reset_cache()  # of an earlier Ray of this process


def make_ray_token(file: Path) -> None:
    """Make a token for this user alone; a Ray that this process starts answers only to it."""
    write_atomically(file, secrets.token_hex(32), private=True)
    use_ray_token(file)


def ray_directory() -> Path:
    """Return the directory of Ray's sockets and logs on this node, which only this user reaches.

    Ray opens it to everybody as it starts, hence one within another. Its usual place is one for all
    users of a machine, where the second of them cannot start it and everyone can reach everyone's
    sockets. Raises UserError when somebody else has made the directory.
    """
    return user_directory("ray") / "ray"


def start_ray(token_file: Path, gpus: str | None = None) -> str:
    """Start a Ray cluster on this machine, which this process joins; returns its address.

    Ray listens on every interface, whatever address it is given: only who can read `token_file`,
    which is made here, can use it. `gpus`: what the cluster may hand out, as in
    CUDA_VISIBLE_DEVICES; None: all that there are. Raises ComponentFailure.
    """
    make_ray_token(token_file)
    _remove_dead_sessions(ray_directory())
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
        for left in reversed(range(_STARTS)):
            try:
                return _init(own)
            except Exception as error:  # Ray raises it as such, too, when a start takes too long
                ray.shutdown()  # nothing half-started is left
                if not left:
                    raise ComponentFailure(
                        f"Ray did not start, twice ({one_line(error)}): {_own_account()}"
                    ) from error
    raise AssertionError


def join_ray(address: str) -> None:
    """Connect this process to the Ray cluster at `address`. Raises ComponentFailure."""
    if ray.is_initialized():
        return
    try:
        _init({"address": address})
    except Exception as error:  # as above
        ray.shutdown()
        raise ComponentFailure(
            f"the Ray cluster at {address} cannot be joined from {socket.gethostname()} "
            f"({one_line(error)}): check that it runs, and that this node reaches it"
        ) from error


def _init(arguments: dict[str, Any]) -> str:
    """`ray.init` that leaves SIGTERM as it was: Ray's own handler prints its C++ stack.

    Nor does Ray print the traceback of a call that fails before its reply is awaited: who awaits
    it shows one sentence.
    """
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    # Ray puts the driver's working directory first on the path of its workers, but not for a job
    # of its own client.
    arguments["job_config"] = JobConfig(ray_namespace=NAMESPACE, _client_job=True)
    context = ray.init(**arguments, namespace=NAMESPACE, log_to_driver=False, logging_level="error")
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)
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


def _own_account() -> str:
    """The last line of the newest log of the Ray that this process has started last."""
    sessions = sorted(ray_directory().glob(f"session_*_{os.getpid()}"))
    logs = [log for log in sessions[-1].glob("logs/*") if log.is_file()] if sessions else []
    for log in sorted(logs, key=lambda file: file.stat().st_mtime, reverse=True):
        lines = log.read_text(errors="replace").split("\n")
        if last := next((line.strip() for line in reversed(lines) if line.strip()), ""):
            return f"its last line is {last[:300]!r} ({log})"
    return f"it has left no log in {ray_directory()}"


def _remove_dead_sessions(directory: Path) -> None:
    """Remove the files of Rays that no process is of, but for the newest: it may explain an end."""
    sessions = sorted(path for path in directory.glob("session_*") if not path.is_symlink())
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    for session in sessions[:-1]:
        if not any(session.name in line for line in lines):
            shutil.rmtree(session, ignore_errors=True)
