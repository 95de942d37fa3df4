"""Attempts of the trainer: when a rank fails, torchrun starts all of them again.

Invariants
- A failure belongs to one attempt: what an earlier one has left is no cause of a later end.
- A restart is a warning (console, metrics.jsonl, report, trackers) that names cause and checkpoint.
"""

import logging
import os

from megatron_async.errors import attempt_line, cause_in_log
from megatron_async.run_directory import RunDirectory

logger = logging.getLogger(__name__)


def current_attempt() -> int:
    """Return how often torchrun has started the ranks again before this start of them."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def begin_attempt(directory: RunDirectory) -> str:
    """Mark the begin in the log; return the cause of a restart on rank 0, else an empty text."""
    attempt = current_attempt()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(attempt_line(attempt), flush=True)
    if not attempt or os.environ.get("RANK", "0") != "0":
        return ""
    left = directory.take_failure(before=attempt)
    if left is not None:
        return str(left["sentence"])
    logs = (path.read_text(errors="replace") for path in directory.logs.glob("trainer*.log"))
    causes = (cause_in_log(log, attempt - 1) for log in logs)
    return next(filter(None, causes), "its logs show no reason")


def restart_warning(cause: str, step: int, most: int) -> tuple[str, str]:
    """Return name and text of the warning. `step`: of the checkpoint; `most`: restarts in all."""
    attempt = current_attempt()
    text = (
        f"a trainer rank failed ({cause}); all ranks have started again from step {step}, restart "
        f"{attempt} of at most {most} (trainer.max_restarts)"
    )
    logger.warning("%s", text)
    return f"trainer_restart_{attempt}", text
