"""Finds the engines that caused the failure of a broadcast.

When one rank of a group is lost, the receives of all others fail, and each of their engines reports
that as an error of its own. Only engines that caused the failure may be left out of the update.
"""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, Final

from megatron_async.weight_sync.http import (
    EngineCallError,
    EngineCalls,
    failures_of,
    raise_together,
)

# SGLang's words for a receive that failed (`update_weights_from_distributed` of its scheduler).
_FAILED_RECEIVE: Final = "Failed to receive weights"
_GRACE_SECONDS: Final = 2.0
_HEALTH_SECONDS: Final = 5.0
# Longest time of `raise_lost`.
SEARCH_SECONDS: Final = 2 * _GRACE_SECONDS + _HEALTH_SECONDS


def raise_own_failures(announced: Sequence[Future[dict[str, Any]]]) -> bool:
    """Raise the failures that are an engine's own: no connection, or a refusal.

    Returns:
        Whether an engine reports that its receive failed, which another engine may have caused.
    """
    failures = failures_of(announced)
    raise_together([failure for failure in failures if not _is_failed_receive(failure)])
    return bool(failures)


def raise_lost(announced: Sequence[Future[dict[str, Any]]], calls: EngineCalls) -> None:
    """Raise an EngineCallError that names the engines which caused the failure of a broadcast.

    The sender must have left the group, so that engines which wait only for it reply. The engines
    at fault are the first of these groups that is not empty: engines whose call failed otherwise
    than by its receive, engines that fail a health check, engines that have not replied to the
    call, engines whose receive failed. The function returns if all are empty.
    """
    wait(announced, _GRACE_SECONDS)
    raise_own_failures(announced)
    health = calls.start("health", lambda _: None, _HEALTH_SECONDS, method="GET")
    wait(health, _HEALTH_SECONDS + _GRACE_SECONDS)
    raise_together(failures_of(health))
    pairs = zip(calls.engines, announced, strict=True)
    silent = [engine.engine_id for engine, call in pairs if not call.done()]
    if silent:
        raise EngineCallError(f"{', '.join(silent)} did not reply to a failed broadcast", silent)
    raise_together(failures_of(announced))


def _is_failed_receive(failure: EngineCallError) -> bool:
    return failure.status is not None and _FAILED_RECEIVE in str(failure)
