"""Ends and restarts of the trainer: when one rank fails, torchrun starts all ranks again.

A start of all ranks is called an attempt. Attempts are identified by the port at which their ranks
connect (MASTER_PORT), which torchrun chooses anew for each one. They are counted by lineages,
because agents of several nodes do not share torchrun's own count.

Invariants
- A failure belongs to one attempt: an earlier attempt's failure is never reported as the cause of a
  later end.
- A failure with a sentence is left in the run directory; a disk that takes no more changes neither
  the exit code nor what the rank failed of.
- Each restart adds a warning with its cause and its checkpoint to the console, metrics.jsonl, the
  report and the trackers.
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
"""Environment variable with the number of the first lineage of a launch; the launcher sets it."""


def current_attempt() -> str:
    """Return the identity of this attempt, equal on all its ranks."""
    return os.environ.get("MASTER_PORT", "")


def begin_attempt(directory: RunDirectory) -> str:
    """Write `ATTEMPT_LINE` to the log, and remove an earlier attempt's failure on rank 0.

    Call this before anything that can fail, so that no rank of this attempt has failed yet.

    Returns:
        The message of the earlier failure; empty on other ranks and if no message was left.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(ATTEMPT_LINE, flush=True)
    if os.environ.get("RANK", "0") != "0":
        return ""
    failure = directory.pop_failure(except_of=current_attempt())
    return str(failure["message"]) if failure else ""


def restarts(lineage: int) -> int:
    """Return how many times torchrun has restarted the ranks of this launch.

    An attempt that failed before it had a lineage is only in the count of torchrun's own agent.
    """
    own = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return max(own, lineage - int(os.environ.get(FIRST_LINEAGE_VARIABLE, lineage)))


def restart_warning(number: int, cause: str, step: int, most: int) -> tuple[str, str]:
    """Return the name and the text of the warning about a restart, and log the text.

    Args:
        number: Restarts so far, this one included.
        cause: Message of the failure; empty to search the log of this node for the cause.
        step: Step of the checkpoint that was loaded; 0 if there was none.
        most: `trainer.max_restarts`.
    """
    cause = cause or _cause_in_own_log() or "its log shows no reason"
    where = f"the checkpoint of step {step}" if step else "the beginning"
    text = (
        f"a trainer rank failed ({cause}); all ranks have started again from {where}; "
        f"{max(0, most - number)} of {most} restarts are left (trainer.max_restarts)"
    )
    logger.warning("%s", text)
    return f"trainer_restart_{number}", text


def _cause_in_own_log() -> str | None:
    """Search the previous attempt's part of the log file that this process writes to."""
    log = Path("/proc/self/fd/1").resolve()
    text = log.read_text(errors="replace") if log.is_file() else ""
    return cause_in_log(text.rpartition(ATTEMPT_LINE)[0])


def exit_code(directory: RunDirectory, work: Callable[[], None]) -> int:
    """Do a rank's `work`; return 0, 1 for a failed component, 2 for bad input."""
    try:
        with translating_disk_errors():
            work()
    except (UserError, ComponentFailure) as error:
        code = 2 if isinstance(error, UserError) else 1
        try:
            directory.report_failure(str(error), code, current_attempt())
        except CannotWrite:
            with contextlib.suppress(OSError):  # its log may be on the same disk
                print(f"error: {error}", file=sys.stderr, flush=True)
        return code
    return 0


def leave(code: int) -> NoReturn:
    """End the process at once: gloo's threads of a failed collective would keep it alive."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the log's disk is full; the code is what counts
            stream.flush()
    os._exit(code)
