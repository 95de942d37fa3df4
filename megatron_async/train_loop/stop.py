"""Asking a run to stop soon and cleanly: at the end of its step, with a checkpoint.

Two ways lead to the same flag: SIGUSR2 to the trainer ranks, and a file whose name is in
`MEGATRON_ASYNC_STOP_FILE` (what `launch/` uses: it reaches a process that has not started yet,
and cannot hit a process that does not expect it).

Invariants
- A request is only a flag; the loop looks at it between steps and while it waits for a batch.
- Ranks decide together (`asked_anywhere`): a signal that reached one of them counts for all.
"""

import os
import signal
from pathlib import Path
from types import FrameType

STOP_FILE_VARIABLE = "MEGATRON_ASYNC_STOP_FILE"


class StopAsked(Exception):
    """The run was asked to stop while the trainer waited."""


class StopRequest:
    """A request, by a signal or a file, that this process stop."""

    def __init__(self, flag_file: Path | None = None) -> None:
        self._flag_file = flag_file
        self._signalled = False

    @classmethod
    def from_environment(cls) -> "StopRequest":
        """Make it with the flag file of `launch/`, if any, and the signal handler in place."""
        name = os.environ.get(STOP_FILE_VARIABLE, "")
        request = cls(Path(name) if name else None)
        signal.signal(signal.SIGUSR2, request._on_signal)
        return request

    def asked(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self._signalled or (self._flag_file is not None and self._flag_file.exists())

    def asked_anywhere(self) -> bool:
        """Collective: on any rank."""
        # Here: who only starts ranks and names the file must not wait seconds for torch.
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(self.asked())])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signalled = True
