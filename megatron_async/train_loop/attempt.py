"""Handles exit codes and failure messages of trainer ranks, and counts restarts.

When one rank fails, torchrun restarts all ranks. One start of all ranks is called an attempt. It is
identified by the port at which its ranks connect (MASTER_PORT), which torchrun chooses again for
each attempt. Every attempt whose ranks have connected gets the next lineage number of the run.
Restarts are counted by these numbers, because the torchrun agents of several nodes do not share a
count.

Invariants
- A failure is stored with its attempt, so that the failure of an earlier attempt is never reported
  as the reason for which a later one ended.
- A failure with a message for the user is written to the run directory. If the disk accepts no
  writes, the message is printed, and the rank still ends with the same exit code.
- Each restart causes a warning with its cause and the checkpoint that was loaded. The warning
  appears on the console, in metrics.jsonl, in the report and in the trackers.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from megatron_async.errors import ATTEMPT_LINE, ComponentFailure, UserError, cause_in_log
from megatron_async.files.disk import CannotWrite, translating_disk_errors
from megatron_async.run_directory import RunDirectory

logger = logging.getLogger(__name__)
FIRST_LINEAGE_VARIABLE: Final = "MEGATRON_ASYNC_FIRST_LINEAGE"
"""Environment variable, set by the launcher, with the lineage number of a launch's first
attempt."""


def current_attempt() -> str:
    """Return the identity of this attempt (one start of all ranks), which is equal on all its
    ranks."""
    return os.environ.get("MASTER_PORT", "")


def begin_attempt(directory: RunDirectory) -> str:
    """Mark the start of an attempt in the log of each node. On rank 0, remove the failure that an
    earlier attempt has stored, and return its message.

    Call this before any work that can fail, so that errors of this attempt follow its mark.

    Returns:
        The message of the earlier failure; empty on other ranks, and if no failure was stored.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(ATTEMPT_LINE, flush=True)
    if os.environ.get("RANK", "0") != "0":
        return ""
    failure = directory.pop_failure(except_of=current_attempt())
    return str(failure["message"]) if failure else ""


def restarts(lineage: int) -> int:
    """Return how many times torchrun has restarted the ranks since the run was launched.

    The number is derived from the lineage number. An attempt that failed before it got a lineage
    number is missing in it, but this node's torchrun agent has counted it, so the larger number is
    returned.
    """
    own = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return max(own, lineage - int(os.environ.get(FIRST_LINEAGE_VARIABLE, lineage)))


def restart_warning(number: int, cause: str, step: int, limit: int) -> tuple[str, str]:
    """Return the name and the text of the warning about a restart, and log the text.

    Args:
        number: Restarts so far, including this one.
        cause: Message of the failure; empty to search this node's log for the cause.
        step: Step of the checkpoint that was loaded; 0 if there was none.
        limit: The setting `trainer.max_restarts`.
    """
    cause = cause or _cause_in_own_log() or "its log shows no reason"
    where = f"the checkpoint of step {step}" if step else "step 0"
    text = (
        f"a trainer rank failed ({cause}); all ranks have restarted from {where}; "
        f"{max(0, limit - number)} of {limit} restarts remain (trainer.max_restarts)"
    )
    logger.warning("%s", text)
    return f"trainer_restart_{number}", text


def _cause_in_own_log() -> str | None:
    """Search this process's log file for the error that ended the previous attempt; return it, or
    None if there is none."""
    log = Path("/proc/self/fd/1").resolve()
    text = log.read_text(errors="replace") if log.is_file() else ""
    return cause_in_log(text.rpartition(ATTEMPT_LINE)[0])


def exit_code(directory: RunDirectory, work: Callable[[], None]) -> int:
    """Run a rank's `work` and return its exit code: 0, 1 if a component failed, 2 for bad input.

    The message of a failure is written to the run directory, or printed if the disk accepts no
    writes.
    """
    try:
        with translating_disk_errors():
            work()
    except (UserError, ComponentFailure) as error:
        code = 2 if isinstance(error, UserError) else 1
        try:
            directory.report_failure(str(error), code, current_attempt())
        except CannotWrite:
            with contextlib.suppress(OSError):  # The log may be on the full disk too.
                print(f"error: {error}", file=sys.stderr, flush=True)
        return code
    return 0


def leave(code: int) -> NoReturn:
    """Exit the process immediately with `code`. A normal exit would wait for gloo's threads, which
    still run after a failed collective."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # A full disk must not change the exit code.
            stream.flush()
    os._exit(code)
