"""Ensures by the lock `RUN_DIR/run.lock` that only one launch at a time uses a run.

Every command that changes a run acquires the lock before it writes anything. `train`, `sft`,
`score`, `quickstart`, `rollout` and, on a cluster, the first rollout node hold it until they end,
`launch` while it prepares the run, and `trajectories --drop` while it drops trajectories. Commands
that only read a run (`report`, `trajectories`, `replay`, `eval`, `convert`) do not need it.

Invariants
- A refused launch has changed nothing. The refusal names the process and host that use the run.
"""

import contextlib
import logging
import time
from collections.abc import Iterator

from megatron_async.config import RunConfig
from megatron_async.errors import ComponentFailure, Terminated, UserError
from megatron_async.files.disk import CannotWrite, check_free_space, remove_unfinished, writing
from megatron_async.files.lock import (
    FileLock,
    Holder,
    LockHeld,
    LocksUnsupported,
    check_lock,
    read_holder,
    write_holder,
)
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks.data_identity import data_identity

logger = logging.getLogger(__name__)
# A run needs this much free space for its settings, session files and first transactions. It is
# checked here, because with less the run would fail right after its start.
_MIN_FREE_BYTES = 1 << 20
_POLL_SECONDS = 0.5


class RunInUse(UserError):
    """Raised if another launch uses the run. `holder` is the process that holds the lock; None if
    unknown."""

    def __init__(self, directory: RunDirectory, holder: Holder | None) -> None:
        # The lock of a dead host looks like the lock of a slow host, so a person must decide
        # whether the host is dead.
        remedy = (
            ""
            if holder is None or holder.is_here
            else f"; if host {holder.host} is down for good, remove {directory.lock_file}"
        )
        super().__init__(
            f"{directory.path} is in use by {holder or 'an unknown process'}: wait until it ends, "
            f"or end it first{remedy}"
        )
        self.holder = holder


@contextlib.contextmanager
def hold_run_lock(
    directory: RunDirectory, what: str, *, session: str = "", wait_seconds: float = 0.0
) -> Iterator[None]:
    """Hold the lock of a run for the duration of the block.

    Before the block, this also checks the free space and removes temporary files that a killed
    process left in the run directory.

    Args:
        directory: The run directory.
        what: The command that uses the run, shown to others that are refused.
        session: Name of the session, in a launch over several nodes.
        wait_seconds: How long to wait for another process to release the lock.

    Raises:
        RunInUse: Another process still holds the lock after the wait.
        UserError: The run directory cannot be written.
    """
    holder = Holder.this_process(what, session)
    deadline = time.monotonic() + wait_seconds
    with contextlib.ExitStack() as stack:
        try:
            while True:
                try:
                    stack.enter_context(_lock(directory, holder))
                    break
                except LockHeld as held:
                    if time.monotonic() >= deadline:
                        raise RunInUse(directory, held.holder) from held
                time.sleep(_POLL_SECONDS)
            check_free_space(directory.path, _MIN_FREE_BYTES)
            with writing(directory.logs):
                directory.logs.mkdir(exist_ok=True)
                remove_unfinished(directory.path)
        except CannotWrite as error:
            raise UserError(str(error)) from error
        yield


def check_unclaimed(directory: RunDirectory) -> None:
    """Raise RunInUse if another process holds the run's lock; write nothing (for a dry run)."""
    try:
        check_lock(directory.lock_file)
    except LockHeld as held:
        raise RunInUse(directory, held.holder) from held


def check_new(directory: RunDirectory) -> None:
    """Raise UserError if `new_run` would refuse this directory; write nothing (for a dry run)."""
    if not directory.never_trained():
        directory.check_free()
    check_unclaimed(directory)


@contextlib.contextmanager
def new_run(config: RunConfig, what: str, *, resumable: bool = True) -> Iterator[RunDirectory]:
    """Create the run directory for `config`, and hold its lock for the duration of the block.

    If the directory exists because an earlier start failed before its first step, it is renamed
    first.

    Raises:
        UserError: The run's name is in use, or the directory cannot be written. No new file
            remains.
    """
    directory = RunDirectory.of(config)
    with contextlib.ExitStack() as stack:
        try:
            if directory.never_trained():
                with hold_run_lock(directory, what):
                    moved = directory.set_aside()
                logger.warning("moved an earlier failed start of %s to %s", what, moved)
            # If the directory has a config.yaml, it is not locked, because `create` refuses it
            # anyway.
            if not directory.config_file.exists():
                with writing(directory.path, "run directory"):
                    directory.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(hold_run_lock(directory, what))
            RunDirectory.create(config, data_identity(config), resumable=resumable)
        except (UserError, CannotWrite) as error:
            if not isinstance(error, RunInUse):
                _remove_unfinished(directory)
            raise UserError(str(error)) from error
        try:
            yield directory
        except (UserError, ComponentFailure, KeyboardInterrupt, Terminated) as error:
            directory.note_failed_start(str(error) or "ended by a signal")
            raise


def _remove_unfinished(directory: RunDirectory) -> None:
    """Remove the files that `new_run` has created for a run that was refused; keep other files in
    the directory."""
    if directory.config_file.exists():
        return
    with contextlib.suppress(OSError):
        for file in (directory.lock_file, directory.tokenizer_file, directory.data_file):
            file.unlink(missing_ok=True)
        if directory.logs.exists():
            directory.logs.rmdir()
        directory.path.rmdir()


@contextlib.contextmanager
def _lock(directory: RunDirectory, holder: Holder) -> Iterator[None]:
    """Hold the run's lock file for the duration of the block. Raises LockHeld or CannotWrite."""
    try:
        lock = FileLock.acquire(directory.lock_file, holder)
    except LocksUnsupported as error:
        _check_holder(directory, holder, str(error))
        try:
            yield
        finally:
            # If the file cannot be removed, the run is free nevertheless: on this path, the file
            # counts only while the process that it names is running.
            with contextlib.suppress(OSError):
                directory.lock_file.unlink(missing_ok=True)
        return
    with contextlib.closing(lock):
        yield


def _check_holder(directory: RunDirectory, holder: Holder, error: str) -> None:
    """Write `holder` to the lock file, if the file system does not support locks. Launches on other
    hosts are then not detected.

    Raises:
        LockHeld: The file names a process of this host that is still running.
    """
    before = read_holder(directory.lock_file)
    if before is not None and before.is_running_here():
        raise LockHeld(before)
    logger.warning(
        "%s cannot be locked (%s), so a launch of the same run on another host is not prevented",
        directory.lock_file,
        error,
    )
    with writing(directory.lock_file):
        write_holder(directory.lock_file, holder)
