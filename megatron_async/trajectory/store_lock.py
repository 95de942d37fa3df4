"""Who may write a store: one process at a time, which holds the lock of the file beside it.

The lock is the kernel's and ends with its process; the file names that process. The writer's thread
holds it to its own end (`store_writer`), however long its last write takes.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import TextIO

from megatron_async.errors import UserError

_HELD = (errno.EWOULDBLOCK, errno.EACCES)  # by another; any other error is the file system's


def check_not_in_use(path: Path) -> None:
    """Raises UserError while a process writes the store, that is while its run goes on."""
    lock_store(path).close()


def lock_store(path: Path) -> TextIO:
    """Keep other writers out until the file is closed.

    Raises UserError when a writer has it, or where there are no locks.
    """
    lock = path.with_name(path.name + ".lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        owner = lock.read().strip()
        lock.close()
        if error.errno not in _HELD:
            raise UserError(
                f"trajectory store {path} cannot be locked ({error.strerror}): its file system "
                "does not support flock"
            ) from error
        if owner == str(os.getpid()):
            raise UserError(
                f"{path} is in use by this process, in which an earlier write has not ended"
            ) from error
        raise UserError(
            f"{path} is in use by another process (pid {owner or 'unknown'})"
        ) from error
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()
    return lock
