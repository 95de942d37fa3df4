"""Attempts of the trainer: when a rank fails, torchrun starts all of them again.

Each attempt has a port of its own, at which the ranks of all nodes meet. Lineages count attempts,
since torchrun's own count is not the same on every node.

Invariants
- A failure belongs to one attempt: what an earlier one has left is no cause of a later end.
- A restart is a warning (console, metrics.jsonl, report, trackers) that names cause and checkpoint.
"""

import logging
import os
from pathlib import Path
from typing import Final

from megatron_async.errors import ATTEMPT_LINE, cause_in_log
from megatron_async.run_directory import RunDirectory

logger = logging.getLogger(__name__)
FIRST_LINEAGE_VARIABLE: Final = "MEGATRON_ASYNC_FIRST_LINEAGE"
"""Number of the first lineage of a launch; set by whoever starts its ranks."""


def current_attempt() -> str:
    """Return what only the ranks of this attempt have alike."""
    return os.environ.get("MASTER_PORT", "")


def begin_attempt(directory: RunDirectory) -> str:
    """Mark the begin in the log; return, on rank 0, why the attempt before has ended, if it shows.

    To be called first of all, so that no other rank can have failed before.
    """
    cause = ""
    if os.environ.get("RANK", "0") == "0":
        left = directory.take_failure(but_of=current_attempt())
        cause = left["sentence"] if left else cause_in_log(_own_log()) or ""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(ATTEMPT_LINE, flush=True)
    return cause


def restarts(lineage: int) -> int:
    """Return how often the ranks of this launch were started again.

    An attempt that failed before it took a lineage shows in torchrun's count of its own node.
    """
    own = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return max(own, lineage - int(os.environ.get(FIRST_LINEAGE_VARIABLE, lineage)))


def restart_warning(number: int, cause: str, step: int, most: int) -> tuple[str, str]:
    """Return name and text of the warning of restart `number` of `most`, from step `step`."""
    where = f"the checkpoint of step {step}" if step else "the beginning"
    text = (
        f"a trainer rank failed ({cause or 'its log shows no reason'}); all ranks have started "
        f"again from {where}; {max(0, most - number)} of {most} restarts are left "
        "(trainer.max_restarts)"
    )
    logger.warning("%s", text)
    return f"trainer_restart_{number}", text


def _own_log() -> str:
    """Return the file that this process prints to; empty where it prints to none."""
    log = Path("/proc/self/fd/1").resolve()
    return log.read_text(errors="replace") if log.is_file() else ""
