"""Communication settings that trainer ranks, engines and managers share, however they are started.

Invariants
- Every process that may be in one NCCL group with another gets the same NCCL settings: how buffers
  are handed over is chosen by each process alone, and where two choose differently the first weight
  update hangs or fails.
- Connections between processes leave by an interface that is named: the loopback on one machine,
  else the one by which other nodes reach this one. Gloo would take what the host name resolves to,
  which on many machines is 127.0.1.1.
- What the user has set wins; it reaches all roles, as all inherit it.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Final

import psutil

from megatron_async.engines.nodes import node_address

# SGLang sets both for its servers where they are not set (`_set_envs_and_config`).
_NCCL: Final = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_DEBUG": "WARN",
    # A dead rank ends the others' collectives as an error instead of leaving them to wait.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}
_INTERFACES: Final = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def communication_environment(base: Mapping[str, str], *, one_machine: bool) -> dict[str, str]:
    """Return what a process gets on top of `base`; `one_machine`: no other host takes part."""
    wanted = dict(_NCCL)
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
