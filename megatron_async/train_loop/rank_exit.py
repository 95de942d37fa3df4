"""End of a rank under torchrun: an exit code, and a sentence for whoever started it.

Invariants
- A failure with a sentence is left in the run directory; a disk that takes no more changes neither
  the exit code nor what the rank failed of.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import CannotWrite, naming_disk_errors
from megatron_async.run_directory import RunDirectory
from megatron_async.train_loop.attempt import current_attempt


def exit_code(directory: RunDirectory, work: Callable[[], None]) -> int:
    """Do a rank's `work`; return 0, 1 for a failed component, 2 for bad input."""
    try:
        with naming_disk_errors():
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
