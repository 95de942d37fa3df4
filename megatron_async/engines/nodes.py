"""Ray nodes that the rollout side may use, and the address under which a node is reached.

A trainer node of a cluster launch is a Ray node too, because a process can talk to a Ray cluster
only through a node on its own machine. It carries a label, and nothing of the rollout side is
placed there. In a cluster without labels the selector matches every node.

Trainer ranks, engines and managers share their settings of communication, however they are started.

Invariants
- Every process that may be in one NCCL group with another gets the same NCCL settings: how buffers
  are handed over is chosen by each process alone, and where two choose differently the first weight
  update hangs or fails.
- Connections between processes leave by an interface that is named: the loopback on one machine,
  else the one by which other nodes reach this one. Gloo would take what the host name resolves to,
  which on many machines is 127.0.1.1.
- What the user has set wins; it reaches all roles, as all inherit it.
"""

import os
import signal
import socket
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from megatron_async.errors import UserError, one_line

ROLE_LABEL: Final = "megatron-async-role"
TRAINER_ROLE: Final = "trainer"
NOT_ON_TRAINER_NODES: Final = {ROLE_LABEL: f"!{TRAINER_ROLE}"}

INTERFACE_VARIABLE: Final = "MEGATRON_ASYNC_INTERFACE"
# `engines.host` with this value: each server binds to the address of the node that it is on.
NODE_HOST: Final = "node"
# Addresses of `engines.host` that only this machine reaches.
LOOPBACK: Final = ("127.0.0.1", "localhost")
# Where Ray's head and torch's store listen.
_EVERY_INTERFACE: Final = "0.0.0.0"
# SGLang sets this and NCCL_NVLS_ENABLE to 0 for its servers where they are not set
# (`_set_envs_and_config`).
_NCCL: Final = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    # A dead rank ends the others' collectives as an error instead of leaving them to wait.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
_INTERFACES: Final = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def use_ray_token(file: Path) -> None:
    """Have Ray's processes from here on show the token in `file`, and answer to no other."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def init_ray(**arguments: Any) -> Any:
    """`ray.init` that leaves SIGTERM as it was: Ray's own handler prints its C++ stack.

    Nor does Ray print the traceback of a call that fails before its reply is awaited: who awaits
    it shows one sentence.

    Raises UserError when Ray does not start, or the cluster at `address` cannot be joined.
    """
    import ray

    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        context = ray.init(**arguments)
    except Exception as error:  # Ray raises it as such, too, when a start takes too long
        ray.shutdown()  # nothing half-started is left
        host, address = socket.gethostname(), arguments.get("address")
        if address in (None, "local"):
            what = f"Ray did not start on {host}"
            remedy = (
                f"look into {ray_directory()}/session_latest/logs; on a busy machine, try again"
            )
        else:
            what = f"the Ray cluster at {address} cannot be joined from {host}"
            remedy = "check that it runs, and that this node reaches it"
        raise UserError(f"{what} ({one_line(error)}): {remedy}") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_sigterm)
    return context


def ray_directory() -> Path:
    """Return the directory of Ray's sockets and logs on this node, which only this user reaches.

    Ray opens it to everybody as it starts, hence one within another. Its usual place is one for all
    users of a machine, where the second of them cannot start it and everyone can reach everyone's
    sockets. Not below TMPDIR: the name of a socket must stay short.
    Raises UserError when somebody else has made the directory.
    """
    path = Path(f"/tmp/ray-{os.getuid()}")
    path.mkdir(mode=0o700, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(f"{path}, where Ray is to keep its files, belongs to somebody else")
    path.chmod(0o700)
    return path / "ray"


def node_address() -> str:
    """The IPv4 address at which other nodes reach this one.

    That of the interface named in MEGATRON_ASYNC_INTERFACE (ib0, eth0, ...), else the one that the
    default route leaves by, else what the host name resolves to. Raises UserError for an interface
    that does not exist or has no IPv4 address.
    """
    name = os.environ.get(INTERFACE_VARIABLE, "")
    if name:
        for entry in psutil.net_if_addrs().get(name, []):
            if entry.family == socket.AF_INET:
                return str(entry.address)
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise UserError(
            f"{INTERFACE_VARIABLE} is {name!r}, which is no interface with an IPv4 address on "
            f"{socket.gethostname()} (there are {known})"
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        try:
            opened.connect(("192.0.2.1", 9))  # Documentation address: nothing is sent by connect.
            return str(opened.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def free_port(host: str = _EVERY_INTERFACE) -> int:
    """A port that was free on this interface, or on all of them, a moment ago."""
    with socket.socket() as opened:
        opened.bind((host, 0))
        return int(opened.getsockname()[1])


def communication_environment(
    base: Mapping[str, str], *, one_machine: bool, nvls: bool
) -> dict[str, str]:
    """Return what a process gets on top of `base`; `one_machine`: no other host takes part.

    `nvls`: NCCL may use it where the hardware has it.
    """
    wanted = _NCCL | {"NCCL_NVLS_ENABLE": "2" if nvls else "0"}
    missing = [name for name in _INTERFACES if name not in base]
    if missing:
        interface = interface_of("127.0.0.1" if one_machine else node_address())
        if interface is not None:
            wanted |= dict.fromkeys(missing, interface)
    return {name: value for name, value in wanted.items() if name not in base}


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address; None where none has it."""
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    return None
