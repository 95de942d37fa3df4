"""Lets urgent requests run before others in SGLang's queue.

Requests that verify an engine after an update must not wait behind the queue of a full engine: the
trainer waits for them, and so do the tokens that the engine generates in the meantime. SGLang's own
priorities would sort the queue at every step.

Invariants
- An urgent request runs before every other waiting request. Running requests are not affected.
"""

from typing import Any

QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
# `priority` of urgent requests; SGLang ignores it without --enable-priority-scheduling.
URGENT = 1


def after_queue(result: Any, scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Hook after a request has entered the scheduler's queue: move it to the front if it is urgent.

    SGLang may have rejected the request, which is then not in the queue.
    """
    waiting = scheduler.waiting_queue
    if req.priority == URGENT and waiting and waiting[-1] is req:
        waiting.insert(0, waiting.pop())
        # The flag says that the first request of the queue did not fit. Reset it, because this
        # request may be shorter.
        scheduler.running_batch.batch_is_full = False
