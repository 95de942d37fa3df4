"""Rendezvous of the torchrun agents of several nodes: at node 0, on a port that it chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from megatron_async.engines.nodes import free_port
from megatron_async.launcher.session import Session

MEET_SECONDS: Final = 600.0
_NOTE = "trainers"


@dataclass(frozen=True)
class TrainerNode:
    """A node with trainer ranks, numbered from 0 of `count`; `address` is what others reach."""

    session: Session
    index: int
    count: int
    address: str

    def rendezvous(self) -> list[str]:
        """torchrun's options. Waits for node 0; raises ComponentFailure when it does not come."""
        if self.count == 1:
            return ["--standalone"]
        if self.index == 0:
            endpoint = f"{self.address}:{free_port()}"
            self.session.publish(_NOTE, {"endpoint": endpoint})
        return [
            f"--nnodes={self.count}",
            # c10d, not static: only with it can torchrun restart all ranks after one has died.
            "--rdzv-backend=c10d",
            f"--rdzv-id={self.session.path.name}",
            f"--rdzv-endpoint={self.session.wait_for(_NOTE, MEET_SECONDS)['endpoint']}",
            f"--rdzv-conf=is_host={int(self.index == 0)},join_timeout={MEET_SECONDS:.0f}",
            f"--local-addr={self.address}",
        ]
