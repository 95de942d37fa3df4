"""Liveness of engines: load reports, silence, and the question after a failure.

Invariants
- An engine is given up on evidence about the engine (`engine_health.py`): it does not answer (asked
  twice), it answers nothing or no load report that can be read for `engines.hang_timeout_seconds`,
  or it makes no token for that long although it has requests.
- Restarts are the fleet's business.
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
    """Watches the engines of one driver: its `slots`, by engine id.

    `feed` gets events for the scheduler, `failed` the id of an engine to give up, and the reason.
    """

    settings: EngineConfig
    tracked_engines: Mapping[str, TrackedEngine]
    statistics: RolloutStatistics
    feed: Callable[[ev.Event], None]
    failed: Callable[[str, str], None]

    async def look(self) -> list[TrackedEngine]:
        """Ask the engines that serve for their load; returns those that answer and work."""
        up = [
            tracked
            for tracked in self.tracked_engines.values()
            if tracked.up and not tracked.health.suspended
        ]
        found = await asyncio.gather(*map(self._works, up))
        return [tracked for tracked, works in zip(up, found, strict=True) if works]

    def close(self) -> None:
        """No question that is under way has an effect any more."""
        for tracked in self.tracked_engines.values():
            if tracked.check is not None:
                tracked.check.cancel()

    def give_up(self, tracked: TrackedEngine, why: str) -> None:
        """Take the engine of this slot out of service, unless that has been done."""
        if self._serves(tracked):
            self.failed(tracked.engine_id, why)

    def _serves(self, tracked: TrackedEngine) -> bool:
        return self.tracked_engines.get(tracked.engine_id) is tracked

    async def suspect(self, tracked: TrackedEngine, why: str) -> None:
        """Something failed on it: give it up if it does not answer. One question for all."""
        if not self._serves(tracked):
            return
        if tracked.check is None or tracked.check.done():
            tracked.check = asyncio.get_running_loop().create_task(self._ask(tracked, why))
        await asyncio.shield(tracked.check)

    async def _ask(self, tracked: TrackedEngine, why: str) -> None:
        asked = tracked.clock()
        for pause in (_ASK_AGAIN_SECONDS, 0.0):
            try:
                await tracked.client.version()
            except EngineError as error:
                answer = str(error)
                await asyncio.sleep(pause)
            else:
                self.statistics.warned("engine_suspect", f"{why}; but it answers")
                return
        if not tracked.health.suspended_since(asked):
            self.give_up(tracked, why if answer in why else f"{why}; and then: {answer}")

    async def _works(self, tracked: TrackedEngine) -> bool:
        engine_id, patience = tracked.engine_id, self.settings.hang_timeout_seconds
        asked = tracked.clock()
        try:
            async with AwakeTimeout(patience):
                status = await tracked.client.status()
        except TimeoutError:
            if not tracked.health.suspended_since(asked):
                self.give_up(tracked, f"engine {engine_id} did not answer for {patience:g} s")
            return False
        except EngineError as error:
            tracked.health.queue(None, tracked.clock())
            await self.suspect(tracked, str(error))
            return self._goes_on(tracked)
        if not self._serves(tracked):
            return False
        seen, tracked.preemptions_seen = tracked.preemptions_seen, status.preemptions_total
        preemptions = 0 if seen is None else max(0, status.preemptions_total - seen)
        self.statistics.loaded(engine_id, status.kv_usage, preemptions)
        self.feed(ev.EngineLoad(engine_id, status.kv_usage, preemptions))
        tracked.health.queue(status.queued_requests, tracked.clock())
        return self._goes_on(tracked)

    def _goes_on(self, tracked: TrackedEngine) -> bool:
        """Give up an engine that has made no token, or reported nothing, for too long."""
        patience, now = self.settings.hang_timeout_seconds, tracked.clock()
        silent, unreported = tracked.health.silence(now), tracked.health.unreported(now)
        if max(silent, unreported) <= patience:
            return self._serves(tracked)
        why = f"made no token for {silent:.0f} s, with {tracked.health.requests} requests"
        if silent <= patience:
            why = f"sent no load report that can be read for {unreported:.0f} s"
        self.give_up(tracked, f"engine {tracked.engine_id} {why}")
        return False
