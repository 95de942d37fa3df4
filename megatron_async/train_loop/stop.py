"""The request that a run stop soon and cleanly: at the end of its current step, with a checkpoint.

A run can be asked to stop in two ways: by SIGUSR2 to the trainer ranks, or by creating the file
whose path is in `MEGATRON_ASYNC_STOP_FILE`. The scripts in `launch/` use the file: it also reaches
a process that has not started yet, and it cannot kill a process that has no handler for the signal.

Invariants
- A request only sets a flag. The loop checks the flag between steps and while it waits for a batch.
- Ranks decide together (`asked_anywhere`): a signal that reached one rank counts for all ranks.
"""

import os
import signal
from pathlib import Path
from types import FrameType

STOP_FILE_VARIABLE = "MEGATRON_ASYNC_STOP_FILE"


class StopAsked(Exception):
    """Raised when the run is asked to stop while the trainer waits for the rollout side."""


class StopRequest:
    """A request that this process stop, made by a signal or by creating a file."""

    def __init__(self, flag_file: Path | None = None) -> None:
        self._flag_file = flag_file
        self._signalled = False

    @classmethod
    def from_environment(cls) -> "StopRequest":
        """Create the request with the stop file of the environment, if any, and install the signal
        handler."""
        name = os.environ.get(STOP_FILE_VARIABLE, "")
        request = cls(Path(name) if name else None)
        signal.signal(signal.SIGUSR2, request._on_signal)
        return request

    def asked(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self._signalled or (self._flag_file is not None and self._flag_file.exists())

    def asked_anywhere(self) -> bool:
        """Return whether any rank was asked to stop. Collective."""
        # Imported here, so that the launcher, which only names the file, need not load torch.
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(self.asked())])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signalled = True
