"""Weights that change under requests that keep their KV cache, where SGLang computes a step ahead.

- Watchdog: it kills a server whose scheduler holds a batch and computes nothing for
  `--watchdog-timeout` (300 s). A pause that retracts puts the batch away; `in_place` leaves it, and
  the update of a large model, or a trainer that is restarted meanwhile, takes longer than that.
  SGLang reads the batch for this and for messages alone, and sets it anew when generation goes on.
- Device: a step that was launched before the pause may still be reading the weights.
- Versions: the tokens of that step are added after the change. SGLang counts a request's tokens at
  the change, and would give this one the version of weights that did not compute it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

PAUSE = "sglang.srt.managers.scheduler.Scheduler.pause_generation"
CHANGE = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"


def _ahead(scheduler: Any) -> Iterator[tuple[Any, Any]]:
    """Batches whose results wait to be processed, and the results."""
    yield from getattr(scheduler, "result_queue", ())


def after_pause(result: Any, scheduler: Any, recv_req: Any) -> None:
    """The engine is paused: when this returns, nothing that it holds is being computed."""
    scheduler.cur_batch_for_debug = None
    for _, computed in _ahead(scheduler):
        if computed.copy_done is not None:
            computed.copy_done.synchronize()


def around_change(original: Callable[..., None], scheduler: Any, new_version: str | None) -> None:
    """The weights have changed: what was computed ahead is the old version's."""
    from sglang.srt.runtime_context import get_serving
    from sglang.srt.utils.weight_versions import WeightVersionEvent

    old = str(get_serving().weight_version)
    original(scheduler, new_version)
    if str(get_serving().weight_version) == old:
        return
    for batch, _ in _ahead(scheduler):
        for req in batch.reqs:
            if req.finished() or req.is_retracted or req.inflight_middle_chunks > 0:
                continue  # this step gives it no token
            events = req.weight_version_events
            if events and events[-1].old_version == old:
                events.pop()  # one token short
            events.append(WeightVersionEvent(old, len(req.output_ids) + 1))
