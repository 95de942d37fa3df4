"""Hooks for weights that change under running requests, while SGLang computes one step ahead.

- Watchdog: SGLang kills a server whose scheduler has a batch and computes nothing for
  `--watchdog-timeout` (300 s). A `retract` pause removes the batch, an `in_place` pause leaves it.
  The update of a large model, or the restart of a trainer, may take longer than that. SGLang reads
  the batch only for this check and for messages, and sets it again when generation continues.
- Device: a step that was launched before the pause may still read the weights.
- Versions: the tokens of that step are added after the weights have changed. SGLang counts a
  request's tokens when the weights change, and would label these tokens with a version that did not
  compute them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

PAUSE = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
CHANGE = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"


def _ahead(scheduler: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the batches whose results wait to be processed, with their results."""
    yield from getattr(scheduler, "result_queue", ())


def after_pause(result: Any, scheduler: Any, recv_req: Any) -> None:
    """Hook after a pause: wait until the device has finished all computations, and reset the
    watchdog."""
    scheduler.cur_batch_for_debug = None
    for _, computed in _ahead(scheduler):
        if computed.copy_done is not None:
            computed.copy_done.synchronize()


def around_change(original: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
    """Hook around a change of weights: label tokens that were computed ahead with the old
    version."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old = str(get_serving().weight_version)
    original(scheduler, new_version)
    if str(get_serving().weight_version) == old:
        return
    for batch, _ in _ahead(scheduler):
        for req in batch.reqs:
            if req.finished() or req.is_retracted or req.inflight_middle_chunks > 0:
                continue  # This step adds no token to the request.
            events = req.weight_version_events
            if events and events[-1].old_version == old:
                # SGLang has recorded a span that lacks the token of this step; replace it.
                events.pop()
            events.append(WeightVersionEvent(old, len(req.output_ids) + 1))
