"""Starting child processes.

Invariants
- A child imports nothing from the directory that the user works in: a file `random.py` or
  `tokenizers.py` there would replace a module of ours, of Python's or of a library's. Code of the
  user's is loaded by its path (`import_path`).
- A child has a session of its own: Ctrl-C at a terminal reaches the process that started it only.
"""

import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import psutil

SAFE_PATH_VARIABLE: Final = "PYTHONSAFEPATH"
"""Has the effect of `-P` on every Python below a process whose command we do not make."""


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module with this interpreter."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_child(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start `command`; `options` are those of `subprocess.Popen`. Raises OSError."""
    return subprocess.Popen([*command], start_new_session=True, **options)


def wait_until_ended(processes: Iterable[psutil.Process], seconds: float) -> bool:
    """Wait until killed processes have ended; return whether all did within the time limit.

    They need not be children of this process. A zombie counts as ended, because process 1 of a
    container may never reap it.
    """
    deadline = time.monotonic() + seconds
    left = [*processes]
    while (left := [process for process in left if _runs(process)]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
