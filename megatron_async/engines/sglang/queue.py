"""Lets urgent requests go first in SGLang's queue (SGLang's own priorities sort it at every step).

The requests that verify an engine after an update must not wait for all that wait in a full engine:
the trainer waits for them, and so do the tokens that the engine generates meanwhile.

Invariants
- An urgent request runs before every other that waits; what runs already is left alone.
"""

from typing import Any

QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
# `priority` of a request; SGLang does not read it without --enable-priority-scheduling.
URGENT = 1


def after_queue(result: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """A request waits in the scheduler's queue now, unless SGLang has refused it."""
    waiting = scheduler.waiting_queue
    if req.priority == URGENT and waiting and waiting[-1] is req:
        waiting.insert(0, waiting.pop())
        scheduler.running_batch.batch_is_full = False  # found so for a longer one
