"""Provides the request to stop a run at the end of its current step, with a checkpoint.

A run can be asked to stop in two ways: by sending SIGUSR2 to the trainer ranks, or by creating the
file whose path is in the environment variable `MEGATRON_ASYNC_STOP_FILE`. The scripts in `launch/`
create the file: a process that starts later finds it too, whereas the signal would kill a process
that has not installed its handler yet.

Invariants
- A request does not interrupt any work. The training loop checks for it between steps, while it
  waits for a batch and, unless engines share the trainer's devices, while it waits for an
  evaluation.
- All ranks stop together: if any rank was asked, `asked_anywhere` returns True on every rank.
"""

import os
import signal
from pathlib import Path
from types import FrameType

STOP_FILE_VARIABLE = "MEGATRON_ASYNC_STOP_FILE"


class StopAsked(Exception):
    """Raised when the run is asked to stop while the trainer waits for the rollout manager."""


class StopRequest:
    """The request to stop this process, which is made by a signal or by creating a file."""

    def __init__(self, flag_file: Path | None = None) -> None:
        self._flag_file = flag_file
        self._signalled = False

    @classmethod
    def from_environment(cls) -> "StopRequest":
        """Create the object, with the stop file of `MEGATRON_ASYNC_STOP_FILE` if that is set, and
        install a handler for SIGUSR2."""
        name = os.environ.get(STOP_FILE_VARIABLE, "")
        request = cls(Path(name) if name else None)
        signal.signal(signal.SIGUSR2, request._on_signal)
        return request

    def asked(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self._signalled or (self._flag_file is not None and self._flag_file.exists())

    def asked_anywhere(self) -> bool:
        """Return whether any rank was asked to stop. All ranks must call this together."""
        # Imported here for the launcher, which imports this module only for the variable's name and
        # need not load torch.
        import torch
        import torch.distributed as dist

        flag = torch.tensor([int(self.asked())])
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signalled = True
