"""Lists which processes of a run listen for connections, and on which interfaces."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from pathlib import Path

import psutil

PAGE = Path(__file__).parents[1] / "docs" / "clusters.md"
_KINDS = {
    r"engines\.(sglang|simulated)\.server|^sglang::": "engine",
    r"train_loop\.rank": "trainer rank",
    r"megatron_async\.cli train": "`train`",
    r"process_backends\.host rollout-manager|ray::ManagerHost": "rollout manager",
    r"process_backends\.host engine\d+-host|ray::EngineHost": "host of an engine",
    r"scoring\.process_main": "scorer",
    r"ray::ScorerWorker": "scorer's worker",
    r"torch\.distributed\.run": "torchrun",
    r"gcs_server|raylet|/ray/|^ray::": "Ray",
}


def kind_of(process: psutil.Process) -> str:
    """Return the name of a run's process on the page docs/clusters.md."""
    line = " ".join(process.cmdline())
    return next((kind for mark, kind in _KINDS.items() if re.search(mark, line)), line)


def listening(processes: Iterable[psutil.Process]) -> set[tuple[str, str]]:
    """Return pairs of a process kind and the interface on which it listens, from /proc/net/tcp and
    tcp6."""
    found = set()
    for process in processes:
        try:
            addresses = {
                connection.laddr.ip
                for connection in process.net_connections("tcp")
                if connection.status == psutil.CONN_LISTEN
            }
            found |= {(kind_of(process), _interface(address)) for address in addresses}
        except psutil.NoSuchProcess:
            continue
    return found


def _interface(address: str) -> str:
    found = ipaddress.ip_address(address.removeprefix("::ffff:"))
    if found.is_loopback:
        return "loopback"
    return "every interface" if found.is_unspecified else address


def documented() -> set[tuple[str, str]]:
    """Return the pairs that the page lists for the processes of one machine."""
    table = PAGE.read_text().partition("| listens | `local` |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^ *\| ([^|]+) \| ([^|]+) \|$", table, re.M)
    assert rows
    return set(rows)
