"""Separates cached prompt prefixes of different policy versions, inside SGLang's scheduler.

With `kv: keep` an update does not flush the prefix cache, because running requests keep their
cache. SGLang would then give a *new* request the KV that older weights have computed for the same
prompt, and its log-probs would differ by nats from those of the version that it is labeled with.
SGLang separates prefixes by a request's `cache_salt`; here the salt is the version of the weights.

The scheduler sets the salt, not the client. A request may wait in the engine's queue after it was
sent and before its prefix is looked up, and the weights may change in the meantime.

Invariants
- A waiting request, whether new or sent back to the queue, has the salt of the current weights.
- A running request keeps the salt that it started with. The KV that it leaves in the cache was
  computed by several versions, and no later request finds it.
- Requests under the same version share prefixes, for example the members of a group.
"""

from typing import Any

QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
CHANGE = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"


def _version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def before_queue(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Hook before a request enters the scheduler's queue: set its salt to the current version."""
    req.cache_salt = _version()


def after_change(result: Any, scheduler: Any, new_version: str | None) -> None:
    """Hook after a change of weights: set the salt of all waiting requests to the new version.

    They have computed nothing with the old weights.
    """
    for req in scheduler.waiting_queue:
        req.cache_salt = _version()
