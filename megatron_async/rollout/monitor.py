"""Liveness of engines: load reports, silence, and the question after a failure.

Invariants
- An engine is given up on evidence about the engine: it does not answer (asked twice), it answers
  nothing for `engines.no_progress_seconds`, or it makes no token for that long although it has
  requests. What it leaves unanswered while it is held (paused, receiving weights) is no evidence.
- Restarts are the fleet's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from megatron_async.awake import AwakeTimeout
from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineError
from megatron_async.rollout.engine_slot import EngineSlot
from megatron_async.rollout.generation import Generation
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler import events as ev

_ASK_AGAIN_SECONDS = 0.5


class EngineMonitor:
    """Watches the engines of one driver."""

    def __init__(
        self,
        settings: EngineConfig,
        slots: Mapping[str, EngineSlot],
        generation: Callable[[], Generation],
        statistics: RolloutStatistics,
        feed: Callable[[ev.Event], None],
        failed: Callable[[str, str], None],
    ) -> None:
        """`slots`: those of the driver, by engine id. `failed` takes an engine out of service."""
        self._settings = settings
        self._slots = slots
        self._generation = generation
        self._statistics = statistics
        self._feed = feed
        self._failed = failed

    async def run(self) -> None:
        """Ask the engines that serve for their load, for ever."""
        while True:
            await asyncio.sleep(self._settings.health_interval_seconds)
            up = [slot for slot in self._slots.values() if slot.up and not slot.watch.held]
            await asyncio.gather(*(self._look_at(slot) for slot in up))

    def close(self) -> None:
        """No question that is under way has an effect any more."""
        for slot in self._slots.values():
            if slot.check is not None:
                slot.check.cancel()

    def give_up(self, slot: EngineSlot, why: str) -> None:
        """Take the engine of this slot out of service, unless that has been done."""
        if self._serves(slot):
            self._failed(slot.engine_id, why)

    def _serves(self, slot: EngineSlot) -> bool:
        return self._slots.get(slot.engine_id) is slot

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
                self._statistics.warned("engine_suspect", f"{why}; but it answers")
                return
        if not slot.watch.held_since(asked):
            self.give_up(slot, why if answer in why else f"{why}; and then: {answer}")

    async def _look_at(self, slot: EngineSlot) -> None:
        engine_id, patience = slot.engine_id, self._settings.no_progress_seconds
        asked = slot.clock()
        try:
            async with AwakeTimeout(patience):
                status = await slot.client.status()
        except TimeoutError:
            if not slot.watch.held_since(asked):
                self.give_up(slot, f"engine {engine_id} did not answer for {patience:g} s")
            return
        except EngineError as error:
            await self.suspect(slot, str(error))
            return
        if not self._serves(slot):
            return
        now = slot.clock()
        seen, slot.preemptions_seen = slot.preemptions_seen, status.preemptions_total
        preemptions = 0 if seen is None else max(0, status.preemptions_total - seen)
        self._statistics.loaded(engine_id, status.kv_usage, preemptions)
        self._feed(ev.EngineLoad(engine_id, status.kv_usage, preemptions))
        slot.watch.queue(status.queued_requests, now)
        silent = slot.watch.silence(now)
        if silent > patience:
            self.give_up(
                slot,
                f"engine {engine_id} made no token for {silent:.0f} s, with "
                f"{slot.watch.requests} requests",
            )
        else:
            self._generation().end_silent(slot, self._settings.request_timeout_seconds)
