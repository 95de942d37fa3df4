"""Liveness of engines: load reports, silence, and the question after a failure.

Invariants
- An engine is given up on evidence about the engine (`evidence.py`): it does not answer (asked
  twice), it answers nothing or no load report that can be read for `engines.no_progress_seconds`,
  or it makes no token for that long although it has requests.
- Restarts are the fleet's business.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineError
from megatron_async.rollout.engine_slot import EngineSlot
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.runtime.time_limits import AwakeTimeout
from megatron_async.scheduler import events as ev

_ASK_AGAIN_SECONDS = 0.5


@dataclass(frozen=True, eq=False)
class EngineMonitor:
    """Watches the engines of one driver: its `slots`, by engine id.

    `feed` gets events for the scheduler, `failed` the id of an engine to give up, and the reason.
    """

    settings: EngineConfig
    slots: Mapping[str, EngineSlot]
    statistics: RolloutStatistics
    feed: Callable[[ev.Event], None]
    failed: Callable[[str, str], None]

    async def look(self) -> list[EngineSlot]:
        """Ask the engines that serve for their load; returns those that answer and work."""
        up = [slot for slot in self.slots.values() if slot.up and not slot.evidence.held]
        found = await asyncio.gather(*map(self._works, up))
        return [slot for slot, works in zip(up, found, strict=True) if works]

    def close(self) -> None:
        """No question that is under way has an effect any more."""
        for slot in self.slots.values():
            if slot.check is not None:
                slot.check.cancel()

    def give_up(self, slot: EngineSlot, why: str) -> None:
        """Take the engine of this slot out of service, unless that has been done."""
        if self._serves(slot):
            self.failed(slot.engine_id, why)

    def _serves(self, slot: EngineSlot) -> bool:
        return self.slots.get(slot.engine_id) is slot

    async def suspect(self, slot: EngineSlot, why: str) -> None:
        """Something failed on it: give it up if it does not answer. One question for all."""
        if not self._serves(slot):
            return
        if slot.check is None or slot.check.done():
            slot.check = asyncio.get_running_loop().create_task(self._ask(slot, why))
        await asyncio.shield(slot.check)

    async def _ask(self, slot: EngineSlot, why: str) -> None:
        asked = slot.clock()
        for pause in (_ASK_AGAIN_SECONDS, 0.0):
            try:
                await slot.client.version()
            except EngineError as error:
                answer = str(error)
                await asyncio.sleep(pause)
            else:
                self.statistics.warned("engine_suspect", f"{why}; but it answers")
                return
        if not slot.evidence.held_since(asked):
            self.give_up(slot, why if answer in why else f"{why}; and then: {answer}")

    async def _works(self, slot: EngineSlot) -> bool:
        engine_id, patience = slot.engine_id, self.settings.no_progress_seconds
        asked = slot.clock()
        try:
            async with AwakeTimeout(patience):
                status = await slot.client.status()
        except TimeoutError:
            if not slot.evidence.held_since(asked):
                self.give_up(slot, f"engine {engine_id} did not answer for {patience:g} s")
            return False
        except EngineError as error:
            slot.evidence.queue(None, slot.clock())
            await self.suspect(slot, str(error))
            return self._goes_on(slot)
        if not self._serves(slot):
            return False
        seen, slot.preemptions_seen = slot.preemptions_seen, status.preemptions_total
        preemptions = 0 if seen is None else max(0, status.preemptions_total - seen)
        self.statistics.loaded(engine_id, status.kv_usage, preemptions)
        self.feed(ev.EngineLoad(engine_id, status.kv_usage, preemptions))
        slot.evidence.queue(status.queued_requests, slot.clock())
        return self._goes_on(slot)

    def _goes_on(self, slot: EngineSlot) -> bool:
        """Give up an engine that has made no token, or reported nothing, for too long."""
        patience, now = self.settings.no_progress_seconds, slot.clock()
        silent, unreported = slot.evidence.silence(now), slot.evidence.unreported(now)
        if max(silent, unreported) <= patience:
            return self._serves(slot)
        why = f"made no token for {silent:.0f} s, with {slot.evidence.requests} requests"
        if silent <= patience:
            why = f"sent no load report that can be read for {unreported:.0f} s"
        self.give_up(slot, f"engine {slot.engine_id} {why}")
        return False
