"""Finds addresses of nodes, and provides the communication settings that all processes of a run
must have in common.

Trainer ranks, engines and managers get these settings as environment variables, however they are
started.

Invariants
- Every process that may be in one NCCL group with another gets the same NCCL settings. Each process
  chooses from its own settings how buffers are transferred. If two processes of a group chose
  differently, the first weight update would hang or fail.
- The network interface for connections between processes is named explicitly: the loopback
  interface on one machine, otherwise the interface by which other nodes reach this one. Without
  that, gloo would use the address that the host name resolves to, often 127.0.1.1.
- Communication settings that the user has set in the environment are kept. All processes inherit
  them, so they are equal everywhere.
"""

import os
import re
import socket
from collections.abc import Mapping
from typing import Final

import psutil

from megatron_async.errors import UserError

INTERFACE_VARIABLE: Final = "MEGATRON_ASYNC_INTERFACE"
# Environment variable with the directory through which trainer ranks form their process group, if
# all ranks are on one machine.
RENDEZVOUS_VARIABLE: Final = "MEGATRON_ASYNC_RENDEZVOUS"
# With this value of `engines.host`, each server binds to the address of its node.
NODE_HOST: Final = "node"
LOOPBACK: Final = "127.0.0.1"
# Address of all interfaces, on which Ray's head process and torch's TCP store listen.
_EVERY_INTERFACE: Final = "0.0.0.0"
# NCCL settings of all processes; `communication_environment` adds NCCL_NVLS_ENABLE. Unless
# NCCL_CUMEM_ENABLE and NCCL_NVLS_ENABLE are set, SGLang sets both to 0 for its servers
# (`_set_envs_and_config`), and trainer ranks need the same values as the servers.
_NCCL: Final = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
# torch's allocator options. torch reads the first of these variables that is set.
ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SEGMENTS: Final = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
_INTERFACES: Final = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def is_loopback(host: str) -> bool:
    """Return whether an engine with this `engines.host` can only be reached from its own
    machine."""
    return host == "localhost" or host.startswith("127.")


def node_address() -> str:
    """Return the IPv4 address at which other nodes reach this one.

    It is the address of the interface that MEGATRON_ASYNC_INTERFACE names (ib0, eth0, ...). If that
    is not set, it is the address of the default route or, if there is none, what the host name
    resolves to.

    Raises:
        UserError: If that interface does not exist or has no IPv4 address.
    """
    name = os.environ.get(INTERFACE_VARIABLE, "")
    if name:
        for entry in psutil.net_if_addrs().get(name, []):
            if entry.family == socket.AF_INET:
                return str(entry.address)
        known = ", ".join(sorted(psutil.net_if_addrs()))
        raise UserError(
            f"{INTERFACE_VARIABLE} is {name!r}; {socket.gethostname()} has no interface of that "
            f"name with an IPv4 address. Choose one of {known}."
        )
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        try:
            # Connecting a UDP socket sends nothing. It only selects the interface of the default
            # route, whose address is then read.
            opened.connect(("192.0.2.1", 9))
            return str(opened.getsockname()[0])
        except OSError:
            return socket.gethostbyname(socket.gethostname())


def free_port() -> int:
    """Return a port that was free on every interface when it was checked. It is not reserved, so
    another process may take it."""
    with socket.socket() as opened:
        opened.bind((_EVERY_INTERFACE, 0))
        return int(opened.getsockname()[1])


def reserve_port(host: str) -> socket.socket:
    """Bind a socket to a free port, so that no other process gets this port while the socket is
    open.

    The socket does not listen. On Linux, a server that is given the port and sets SO_REUSEADDR can
    therefore still listen on it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


def communication_environment(
    base: Mapping[str, str], *, one_machine: bool, nvls: bool
) -> dict[str, str]:
    """Return the environment variables that a process needs for communication by NCCL or gloo and
    that the inherited environment `base` lacks.

    Args:
        base: The environment that the process inherits.
        one_machine: Whether all processes are on this machine.
        nvls: Whether NCCL may use NVLink SHARP if the hardware has it.
    """
    wanted = _NCCL | {"NCCL_NVLS_ENABLE": "2" if nvls else "0"}
    missing = [name for name in _INTERFACES if name not in base]
    if missing:
        interface = interface_of("127.0.0.1" if one_machine else node_address())
        if interface is not None:
            wanted |= dict.fromkeys(missing, interface)
    return {name: value for name, value in wanted.items() if name not in base}


def without_expandable_segments(base: Mapping[str, str]) -> dict[str, str]:
    """Return new values for those torch allocator variables in `base` that enable expandable
    segments, without this option.

    CUDA IPC and SGLang's memory saver do not work on memory in expandable segments. Other allocator
    options are kept.
    """
    found = {name: base[name] for name in ALLOCATOR_VARIABLES if name in base}
    changed = {n: _SEGMENTS.sub("expandable_segments:False", v) for n, v in found.items()}
    return {name: value for name, value in changed.items() if value != found[name]}


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address; None if there is none."""
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    return None
