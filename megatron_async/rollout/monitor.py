"""Checks that engines are alive: polls their load, reads how long they made no token, and asks an
engine for its version after a request on it failed.

Invariants
- An engine is taken out of service only on evidence about the engine itself (`engine_health.py`).
  The monitor takes it out if two calls in a row for its version fail, or if for
  `engines.hang_timeout_seconds` it does not reply to a poll, sends no readable load report, or
  makes no token although it has requests.
- The monitor never restarts an engine; the fleet does.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineError
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.rollout.tracked_engine import TrackedEngine
from megatron_async.runtime.time_limits import AwakeTimeout
from megatron_async.scheduler import events as ev

_ASK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, eq=False)
class EngineMonitor:
    """Watches the engines of one driver and reports the engines that must be taken out of service.

    Attributes:
        tracked_engines: State of each engine, by engine id.
        feed: Function that passes an event to the scheduler.
        failed: Function that takes an engine out of service; gets the engine id and the reason.
    """

    settings: EngineConfig
    tracked_engines: Mapping[str, TrackedEngine]
    statistics: RolloutStatistics
    feed: Callable[[ev.Event], None]
    failed: Callable[[str, str], None]

    async def poll(self) -> list[TrackedEngine]:
        """Poll the load of all serving engines concurrently; return the engines that reply and make
        progress.

        Engines that do not reply, or make no progress for `engines.hang_timeout_seconds`, are taken
        out of service.
        """
        up = [
            tracked
            for tracked in self.tracked_engines.values()
            if tracked.up and not tracked.health.suspended
        ]
        found = await asyncio.gather(*map(self._poll_engine, up))
        return [tracked for tracked, works in zip(up, found, strict=True) if works]

    def close(self) -> None:
        """Cancel all liveness checks that are running."""
        for tracked in self.tracked_engines.values():
            if tracked.check is not None:
                tracked.check.cancel()

    def give_up(self, tracked: TrackedEngine, why: str) -> None:
        """Take an engine out of service for the reason `why`, unless it has been taken out
        already."""
        if self._serves(tracked):
            self.failed(tracked.engine_id, why)

    def _serves(self, tracked: TrackedEngine) -> bool:
        return self.tracked_engines.get(tracked.engine_id) is tracked

    async def suspect(self, tracked: TrackedEngine, why: str) -> None:
        """Check whether an engine on which something failed still replies, and take it out of
        service if it does not.

        Concurrent calls for one engine share one check.
        """
        if not self._serves(tracked):
            return
        if tracked.check is None or tracked.check.done():
            tracked.check = asyncio.get_running_loop().create_task(self._check_reply(tracked, why))
        await asyncio.shield(tracked.check)

    async def _check_reply(self, tracked: TrackedEngine, why: str) -> None:
        started = tracked.clock()
        for pause in (_ASK_AGAIN_SECONDS, 0.0):
            try:
                await tracked.client.version()
            except EngineError as error:
                answer = str(error)
                await asyncio.sleep(pause)
            else:
                self.statistics.warned("engine_suspect", f"{why}; but the engine replies")
                return
        if not tracked.health.suspended_since(started):
            self.give_up(tracked, why if answer in why else f"{why}; afterward: {answer}")

    async def _poll_engine(self, tracked: TrackedEngine) -> bool:
        engine_id, patience = tracked.engine_id, self.settings.hang_timeout_seconds
        started = tracked.clock()
        try:
            async with AwakeTimeout(patience):
                status = await tracked.client.status()
        except TimeoutError:
            if not tracked.health.suspended_since(started):
                self.give_up(tracked, f"engine {engine_id} did not reply for {patience:g} s")
            return False
        except EngineError as error:
            tracked.health.queue(None, tracked.clock())
            await self.suspect(tracked, str(error))
            return self._check_progress(tracked)
        if not self._serves(tracked):
            return False
        seen, tracked.preemptions_seen = tracked.preemptions_seen, status.preemptions_total
        preemptions = 0 if seen is None else max(0, status.preemptions_total - seen)
        self.statistics.loaded(engine_id, status.kv_usage, preemptions)
        self.feed(ev.EngineLoad(engine_id, status.kv_usage, preemptions))
        tracked.health.queue(status.queued_requests, tracked.clock())
        return self._check_progress(tracked)

    def _check_progress(self, tracked: TrackedEngine) -> bool:
        """Take an engine out of service if it made no token or sent no readable load report for too
        long; return whether it still serves."""
        patience, now = self.settings.hang_timeout_seconds, tracked.clock()
        silent, unreported = tracked.health.silence(now), tracked.health.unreported(now)
        if max(silent, unreported) <= patience:
            return self._serves(tracked)
        why = f"made no token for {silent:.0f} s, with {tracked.health.requests} requests"
        if silent <= patience:
            why = f"sent no readable load report for {unreported:.0f} s"
        self.give_up(tracked, f"engine {tracked.engine_id} {why}")
        return False
