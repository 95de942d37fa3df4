"""A process that ends with whoever started it, also when that is killed.

The starter holds the write end of a pipe, of which the process has the read end: the kernel closes
it when the starter ends. Not a parent-death signal, which follows the thread that started it; one
only wakes a process that is stopped, so that it sees the end of the pipe.

Invariants
- A process that holds a lifeline leads its process group, and takes the group along.
- Nothing that it starts inherits the pipe.
"""

import os
import select
import signal
import threading
from collections.abc import Callable

from megatron_async.runtime.prctl import PDEATHSIG, prctl

LIFELINE_VARIABLE = "MEGATRON_ASYNC_LIFELINE_FD"


def hold_lifeline(last_act: Callable[[], None] = lambda: None) -> None:
    """End this process group when whoever started it is gone, if it left a pipe for that.

    `last_act` is what is done before.
    """
    text = os.environ.pop(LIFELINE_VARIABLE, "")
    if text:
        os.set_inheritable(int(text), False)
        _end_when_ready(int(text), last_act)


def follow_parent() -> None:
    """End this process group when the parent process ends."""
    parent = os.getppid()
    ended = os.pidfd_open(parent)
    if os.getppid() != parent:  # it has ended before the call, and its number may be another's
        os.killpg(os.getpgrp(), signal.SIGKILL)
    _end_when_ready(ended)


def _end_when_ready(descriptor: int, last_act: Callable[[], None] = lambda: None) -> None:
    def wait() -> None:
        ends = select.poll()
        ends.register(descriptor, select.POLLIN)
        ends.poll()  # nothing is ever written: it is ready at the end
        try:
            last_act()
        finally:
            os.killpg(os.getpgrp(), signal.SIGKILL)

    prctl(PDEATHSIG, signal.SIGCONT)
    threading.Thread(target=wait, name="lifeline", daemon=True).start()
