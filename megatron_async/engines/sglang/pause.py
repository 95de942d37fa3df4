"""Keeps SGLang's watchdog from ending an engine that is paused.

The watchdog kills a server whose scheduler holds a batch and computes nothing for
`--watchdog-timeout` (300 s). A pause that retracts puts the batch away; one that keeps the KV cache
(`in_place`) leaves it, and the update of a large model, or a trainer that is restarted meanwhile,
takes longer than that. SGLang reads the batch for this and for messages alone, and sets it anew
when generation goes on.
"""

from typing import Any

PAUSE = "sglang.srt.managers.scheduler.Scheduler.pause_generation"


def after_pause(result: Any, scheduler: Any, recv_req: Any) -> None:
    """The engine is paused: nothing that it holds is being computed."""
    scheduler.cur_batch_for_debug = None
