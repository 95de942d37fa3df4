"""Provides hooks that make weight updates correct while requests are running. SGLang computes one
step ahead: it launches a decode step before it has processed the results of the step before.

- Watchdog: SGLang kills a server whose scheduler has a batch and computes nothing for
  `--watchdog-timeout` (300 s). During an `in_place` pause the scheduler keeps its batch, and the
  update of a large model or the restart of a trainer may take longer than the timeout. The hook
  removes the reference to the batch that the watchdog reads. SGLang uses it only for this check and
  for messages, and sets it again when generation continues.
- Device: a step that was launched before the pause may still read the weights on the device, so the
  hook waits until it is finished.
- Versions: SGLang records, when the weights change, how many tokens each request has, and labels
  later tokens with the new version. The token of the step that was launched before is added later,
  but the old version computed it. The hook corrects the number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

PAUSE = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
CHANGE = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"


def _ahead(scheduler: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each batch that was launched and whose results are not processed yet, with its
    results."""
    yield from getattr(scheduler, "result_queue", ())


def after_pause(result: Any, scheduler: Any, recv_req: Any) -> None:
    """Hook after a pause: wait until the device has finished all computations, and reset the
    watchdog."""
    scheduler.cur_batch_for_debug = None
    for _, computed in _ahead(scheduler):
        if computed.copy_done is not None:
            computed.copy_done.synchronize()


def around_change(original: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
    """Hook around a change of weights: label tokens that were computed before it, but are not added
    to their requests yet, with the old version."""
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
                # SGLang has just recorded the end of the old version without the token of this
                # step; replace the record.
                events.pop()
            events.append(WeightVersionEvent(old, len(req.output_ids) + 1))
