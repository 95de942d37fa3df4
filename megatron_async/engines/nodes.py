"""Addresses of nodes, and what all processes of a run that communicate must have alike.

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
import re
import socket
from collections.abc import Mapping
from typing import Final

import psutil

from megatron_async.errors import UserError

INTERFACE_VARIABLE: Final = "MEGATRON_ASYNC_INTERFACE"
# Names a directory in which trainer ranks that are all on one machine meet.
RENDEZVOUS_VARIABLE: Final = "MEGATRON_ASYNC_RENDEZVOUS"
# `engines.host` with this value: each server binds to the address of the node that it is on.
NODE_HOST: Final = "node"
LOOPBACK: Final = "127.0.0.1"
# Where Ray's head and torch's store listen.
_EVERY_INTERFACE: Final = "0.0.0.0"
# SGLang sets this and NCCL_NVLS_ENABLE to 0 for its servers where they are not set
# (`_set_envs_and_config`).
_NCCL: Final = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
}
# torch reads the first of these that is set.
ALLOCATOR_VARIABLES: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_SEGMENTS: Final = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)
_INTERFACES: Final = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an engine with this `engines.host`."""
    return host == "localhost" or host.startswith("127.")


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


def free_port() -> int:
    """A port that was free on every interface a moment ago."""
    with socket.socket() as opened:
        opened.bind((_EVERY_INTERFACE, 0))
        return int(opened.getsockname()[1])


def reserve_port(host: str) -> socket.socket:
    """A port that no connection gets while this is open, and no server but one started with it.

    It does not listen, so that on Linux a server that sets SO_REUSEADDR, as they do, may beside it.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held


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


def without_expandable_segments(base: Mapping[str, str]) -> dict[str, str]:
    """Return the allocator variables of `base` that ask for expandable segments, changed.

    Neither CUDA IPC nor SGLang's memory saver works on such memory. Other options of torch's
    allocator in these variables stay.
    """
    found = {name: base[name] for name in ALLOCATOR_VARIABLES if name in base}
    changed = {n: _SEGMENTS.sub("expandable_segments:False", v) for n, v in found.items()}
    return {name: value for name, value in changed.items() if value != found[name]}


def interface_of(address: str) -> str | None:
    """Return the name of the interface with this IPv4 address; None where none has it."""
    for name, entries in sorted(psutil.net_if_addrs().items()):
        if any(entry.family == socket.AF_INET and entry.address == address for entry in entries):
            return name
    return None
