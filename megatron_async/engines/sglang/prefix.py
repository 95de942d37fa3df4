"""Keeps prompt prefixes of one policy version from requests of another, inside SGLang's scheduler.

With `kv: keep` an update does not flush the prefix cache, since requests that run go on with what
they have. SGLang would then give a *new* request the KV that older weights computed for the same
prompt, and its log-probs would be nats away from those of the weights that it is labeled with.
SGLang separates prefixes by a request's `cache_salt`; here the salt is the weights' version.

The salt is set in the scheduler and not by the client: between the moment in which a request is
sent and the one in which its prefix is looked up it may wait in the engine's queue, and the weights
may change meanwhile.

Invariants
- A request that waits, new or sent back to the queue, has the salt of the current weights.
- A request that runs keeps the salt that it began with. What it leaves in the cache was computed by
  several versions, and is found by none that comes later.
- Requests under the same version share prefixes as before (the members of a group).
"""

from typing import Any

QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
CHANGE = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"


def _version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def before_queue(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Mark a request that is about to wait in the scheduler's queue with the present weights."""
    req.cache_salt = _version()


def after_change(result: Any, scheduler: Any, new_version: str | None) -> None:
    """The weights have changed: what still waits has computed nothing with the old ones."""
    for req in scheduler.waiting_queue:
        req.cache_salt = _version()
