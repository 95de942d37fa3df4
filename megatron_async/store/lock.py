"""The right to write a store: one process at a time, which holds the lock of the file beside it.

The lock is the kernel's and ends with its process; the file names that process. The writer's thread
holds it to its own end (`writer`), however long its last write takes.
"""

from __future__ import annotations

import os
from pathlib import Path

from megatron_async.disk import CannotWrite
from megatron_async.errors import UserError
from megatron_async.file_lock import FileLock, Holder, LockHeld, NoLocks
from megatron_async.file_system import file_system_of
from megatron_async.store.place import read_record


def check_not_in_use(run_file: Path) -> None:
    """Raises UserError while a process of this node writes the store (`run.lock` is for others)."""
    record = read_record(run_file)
    database = run_file if record is None else record.database(run_file)
    if database.parent.exists():
        lock_store(database).close()


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
            f"trajectory store {path} cannot be locked ({error}) on {file_system_of(path)}: set "
            "store.directory to a local disk of the rollout manager's node"
        ) from error
    except LockHeld as held:
        if held.holder is not None and held.holder.is_here and held.holder.pid == os.getpid():
            raise UserError(
                f"{path} is in use by this process, in which an earlier write has not ended"
            ) from held
        raise UserError(f"{path} is in use by {held}") from held
