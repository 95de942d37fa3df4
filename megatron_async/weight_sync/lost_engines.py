"""Finds the engines that caused the failure of a broadcast.

If one rank of a group is lost, the broadcast fails on all other ranks, and each engine reports that
its receive failed. Only engines that caused the failure may be excluded from the update.
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

# Words in the error message of SGLang's scheduler for a receive that failed
# (`update_weights_from_distributed`).
_FAILED_RECEIVE: Final = "Failed to receive weights"
_GRACE_SECONDS: Final = 2.0
_HEALTH_SECONDS: Final = 5.0
# Longest time in seconds that `raise_lost` takes.
SEARCH_SECONDS: Final = 2 * _GRACE_SECONDS + _HEALTH_SECONDS


def raise_own_failures(announced: Sequence[Future[dict[str, Any]]]) -> bool:
    """Raise the failures of calls that the called engine itself has caused: it refused the call or
    its connection was lost.

    Returns:
        Whether an engine reports that its receive failed, which another engine of the group may
        have caused.
    """
    failures = failures_of(announced)
    raise_together([failure for failure in failures if not _is_failed_receive(failure)])
    return bool(failures)


def raise_lost(announced: Sequence[Future[dict[str, Any]]], calls: EngineCalls) -> None:
    """Raise an EngineCallError that names the engines which caused the failure of a broadcast.

    The sender must have left the group, so that engines that wait only for the sender reply. The
    following sets of engines are determined one after the other, and the first that is not empty
    contains the engines at fault: engines whose call failed for another reason than a failed
    receive; engines that fail a health check; engines that have not replied to the call; engines
    whose receive failed. If all sets are empty, the function returns.

    Args:
        announced: One call for each engine of `calls`, which announced the bucket that was
            broadcast.
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
