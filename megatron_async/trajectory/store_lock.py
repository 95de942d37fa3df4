"""Who may write a store: one process at a time, which holds the lock of the file beside it.

The lock is the kernel's and ends with its process; the file says which process that is.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from megatron_async.errors import UserError


def check_not_in_use(path: Path) -> None:
    """Raises UserError while a process writes the store, that is while its run goes on."""
    lock_store(path).close()


def lock_store(path: Path) -> TextIO:
    """Keep other writers out until the file is closed. Raises UserError when one has it."""
    lock = path.with_name(path.name + ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip() or "unknown"
        lock.close()
        raise UserError(f"{path} is in use by another process (pid {owner})") from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
