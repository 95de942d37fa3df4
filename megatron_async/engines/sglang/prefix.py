"""Separates cached prompt prefixes of different policy versions, inside SGLang's scheduler.

With `kv: keep` a weight update does not flush the KV cache, so that running requests can keep
theirs. SGLang would then reuse, for a *new* request, the KV that older weights have computed for
the same prompt. The request's log-probs would differ by nats from the log-probs of the version with
which its tokens are labeled. SGLang reuses KV only between requests with the same `cache_salt`, so
the salt is set to the version of the weights.

The scheduler sets the salt, not the client. A request may wait in the engine's queue after it was
sent and before its prefix is looked up, and the weights may change in the meantime.

Invariants
- A waiting request, whether it is new or was moved back to the queue, has the current version as
  its salt.
- A running request keeps the salt that it started with. After an update, the KV that it leaves in
  the cache was computed by several versions. No later request has the old salt, so none reuses it.
- Requests under the same version share prefixes, for example the members of a group.
"""

from typing import Any

QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
CHANGE = "sglang.srt.managers.scheduler.Scheduler.record_weight_version_change"


def _version() -> str:
    from sglang.srt.runtime_context import get_serving

    return str(get_serving().weight_version)


def before_queue(scheduler: Any, req: Any, is_retracted: bool = False) -> None:
    """Hook before a request enters the scheduler's queue: set its `cache_salt` to the current
    version, because SGLang reuses KV only between requests with the same salt."""
    req.cache_salt = _version()


def after_change(result: Any, scheduler: Any, new_version: str | None) -> None:
    """Hook after a change of weights: set the `cache_salt` of all waiting requests to the new
    version. They can then reuse only KV that the new weights have computed; no KV was computed for
    them with the old weights."""
    for req in scheduler.waiting_queue:
        req.cache_salt = _version()
