"""Provides a hook that moves urgent requests to the front of SGLang's queue.

Requests by which an engine is verified after a weight update are urgent: the trainer waits for
their results, and all tokens that the engine generates meanwhile are stored only after them.
SGLang's own priorities are not used, because with them it would sort the queue at every step.

Invariants
- An urgent request is started before every other waiting request. Running requests are not
  affected.
"""

from typing import Any

QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
# Value of the field `priority` in urgent requests. SGLang itself ignores this field without
# --enable-priority-scheduling.
URGENT = 1


def after_queue(result: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Hook after a request has entered the scheduler's queue: move it to the front if it is urgent.

    SGLang may have rejected the request, which is then not in the queue.
    """
    waiting = scheduler.waiting_queue
    if req.priority == URGENT and waiting and waiting[-1] is req:
        waiting.insert(0, waiting.pop())
        # The flag says that the request that was first in the queue did not fit into the batch.
        # Reset it, because the new first request may be shorter.
        scheduler.running_batch.batch_is_full = False
