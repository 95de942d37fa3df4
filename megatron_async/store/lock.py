"""Who may write a store: one process at a time, which holds the lock of the file beside it.

The lock is the kernel's and ends with its process; the file names that process. The writer's thread
holds it to its own end (`writer`), however long its last write takes.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_async.disk import CannotWrite
from megatron_async.errors import UserError
from megatron_async.file_lock import FileLock, Holder, LockHeld, NoLocks


def check_not_in_use(path: Path) -> None:
    """Raises UserError while a process writes the store, that is while its run goes on."""
    lock_store(path).close()


def lock_store(path: Path) -> FileLock:
    """Keep other writers out until the lock is closed.

    Raises UserError when a writer has it, where there are no locks, and when it cannot be written.
    """
    file = path.with_name(path.name + ".lock")
    try:
        return FileLock.take(file, Holder.this_process("trajectory store"))
    except CannotWrite as error:
        raise UserError(str(error)) from error
    except NoLocks as error:
        raise UserError(
            f"trajectory store {path} cannot be locked ({error}): its file system does not support "
            "flock"
        ) from error
    except LockHeld as held:
        if held.holder is not None and held.holder.is_here and held.holder.pid == os.getpid():
            raise UserError(
                f"{path} is in use by this process, in which an earlier write has not ended"
            ) from held
        raise UserError(f"{path} is in use by {held}") from held
