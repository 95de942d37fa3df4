"""A run belongs to one launch at a time: whoever would change it takes `runs/NAME/run.lock` first.

Taken before anything of the run is written, by every command that changes a run, and held as long
as the run goes on: by `train`, `sft` and `quickstart`, and on a cluster by the first rollout node.
Commands that only read (`report`, `trajectories`, `replay`, `eval`, `convert`) do not ask for it;
`trajectories --drop` does.

Invariants
- A refused launch has changed nothing; the refusal names the process and host that have the run.
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
# Settings, session files and the first transactions of a run; its first seconds fail with less.
_ROOM_BYTES = 1 << 20
_POLL_SECONDS = 0.5


class RunInUse(UserError):
    """Another launch has the run; `holder` as far as it is known."""

    def __init__(self, directory: RunDirectory, holder: Holder | None) -> None:
        # Where the kernel cannot distinguish a dead host's lock from a slow one's, a person has to.
        down = (
            ""
            if holder is None or holder.is_here
            else f"; if host {holder.host} is down for good, remove {directory.lock_file}"
        )
        super().__init__(
            f"{directory.path} is in use by {holder or 'an unknown process'}: wait for its end, or "
            f"end it first{down}"
        )
        self.holder = holder


@contextlib.contextmanager
def hold_run_lock(
    directory: RunDirectory, what: str, *, session: str = "", wait_seconds: float = 0.0
) -> Iterator[None]:
    """The run is this process's for the length of the block. `what`: the command, for others.

    Raises RunInUse when another process has it and keeps it for `wait_seconds`, UserError when the
    run directory cannot be written.
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
            check_free_space(directory.path, _ROOM_BYTES)
            with writing(directory.logs):
                directory.logs.mkdir(exist_ok=True)
                remove_unfinished(directory.path)
        except CannotWrite as error:
            raise UserError(str(error)) from error
        yield


def check_unclaimed(directory: RunDirectory) -> None:
    """Refuse what `claimed` would, for a dry run: nothing is written. Raises RunInUse."""
    try:
        check_lock(directory.lock_file)
    except LockHeld as held:
        raise RunInUse(directory, held.holder) from held


def check_new(directory: RunDirectory) -> None:
    """Refuse a place that `new_run` would, for a dry run. Raises UserError."""
    if not directory.never_trained():
        directory.check_free()
    check_unclaimed(directory)


@contextlib.contextmanager
def new_run(config: RunConfig, what: str, *, resumable: bool = True) -> Iterator[RunDirectory]:
    """Make the run of `config`; it is this process's for the length of the block.

    A directory of the name in which a start has failed before its first step is set aside. Raises
    UserError when the name is taken or the place cannot be written; nothing is left then.
    """
    directory = RunDirectory.of(config)
    with contextlib.ExitStack() as stack:
        try:
            if directory.never_trained():
                with hold_run_lock(directory, what):
                    place = directory.set_aside()
                logger.warning("the start of %s before has failed: it is %s now", what, place)
            if not directory.config_file.exists():  # else `create` refuses
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
    """Remove what a run has left that never began; other files in its place stay."""
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
    """Lock the run. Raises LockHeld or CannotWrite."""
    try:
        lock = FileLock.acquire(directory.lock_file, holder)
    except LocksUnsupported as error:
        _check_holder(directory, holder, str(error))
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # of a process that has ended nothing depends on it
                directory.lock_file.unlink(missing_ok=True)
        return
    with contextlib.closing(lock):
        yield


def _check_holder(directory: RunDirectory, holder: Holder, error: str) -> None:
    """Without locks, a living process of this host that the file names counts. Raises LockHeld."""
    before = read_holder(directory.lock_file)
    if before is not None and before.is_running_here():
        raise LockHeld(before)
    logger.warning(
        "%s cannot be locked (%s): nothing keeps a launch of the same run on another host out",
        directory.lock_file,
        error,
    )
    with writing(directory.lock_file):
        write_holder(directory.lock_file, holder)
