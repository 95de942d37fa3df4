"""The engine fleet: starts engines, notices the dead, restarts them, gives up with one sentence.

Invariants
- Engines are mended side by side: a lost node with all its engines costs one start.
- An engine that was (re)started is handed to the driver as stale: it serves nothing before it
  holds the current weights.
- One engine is restarted at most `engines.max_restarts` times; the run goes on while one is left.
  A restart that was cut short because the trainer was lost is begun again and counts once.
- When none is left and none can be restarted, the driver fails with a sentence that has the
  reason; so it does when an engine cannot be mended for another reason.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineClient
from megatron_async.errors import ComponentFailure, ProcessKilled
from megatron_async.rollout.driver import RolloutDriver


class EngineLauncher(Protocol):
    """Starts and stops the process behind engine `index`; time-limited, raises ComponentFailure."""

    async def launch(self, index: int) -> EngineClient: ...

    async def alive(self, index: int) -> bool: ...

    async def stop(self, index: int) -> None: ...


@dataclass
class _Member:
    index: int
    client: EngineClient | None = None
    restarts: int = 0
    lost_because: str = ""


class Fleet:
    """All engines of a run; outlives the drivers that use them one after another."""

    def __init__(self, settings: EngineConfig, launcher: EngineLauncher) -> None:
        self._settings = settings
        self._launcher = launcher
        self._members = [_Member(index) for index in range(settings.count)]

    async def start(self) -> None:
        """Start all engines at once; the first that cannot start fails the run."""
        await asyncio.gather(*(self._start(member) for member in self._members))

    async def _start(self, member: _Member) -> None:
        """Start an engine, again if it is killed on the way; any other failure would come again."""
        while True:
            try:
                member.client = await self._launcher.launch(member.index)
                return
            except ProcessKilled:
                if member.restarts >= self._settings.max_restarts:
                    raise
                member.restarts += 1

    def attach(self, driver: RolloutDriver) -> None:
        """Hand every engine to `driver` as stale, and restart dead ones until the driver closes."""
        for member in self._members:
            if member.client is not None:
                driver.add_engine(member.client)
        for member in self._members:
            if member.client is None:  # the trainer before was lost while this was being mended
                driver.background.spawn(self._restart(driver, member))
        driver.background.spawn(self._take_lost(driver))
        driver.background.spawn(self._look_for_dead_processes(driver))

    async def stop(self) -> None:
        """End every engine process; no driver uses them any more."""
        for member in self._members:
            if member.client is not None:
                await member.client.close()
        await asyncio.gather(
            *(self._launcher.stop(m.index) for m in self._members), return_exceptions=True
        )

    async def _take_lost(self, driver: RolloutDriver) -> None:
        """Mend what the driver gives up, each as soon as it is known."""
        while True:
            engine_id, why = await driver.lost_engines.get()
            for member in self._members:
                if member.client is not None and member.client.engine_id == engine_id:
                    # Forgotten first: a half-closed one must not be handed to the next driver.
                    client, member.client, member.lost_because = member.client, None, why
                    driver.background.spawn(self._restart(driver, member, client))

    async def _look_for_dead_processes(self, driver: RolloutDriver) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval_seconds)
            await asyncio.gather(*(self._look_at(driver, member) for member in self._members))

    async def _look_at(self, driver: RolloutDriver, member: _Member) -> None:
        client = member.client
        if client is None or await self._launcher.alive(member.index):
            return
        if member.client is client:  # not restarted meanwhile
            engine_id = client.engine_id
            driver.engine_failed(engine_id, f"the process of engine {engine_id} has ended")

    async def _restart(
        self, driver: RolloutDriver, member: _Member, lost: EngineClient | None = None
    ) -> None:
        """Restart an engine that was `lost`, or take it out for good."""
        if lost is not None:
            await lost.close()
        await self._launcher.stop(member.index)
        while self._may_restart(member):
            try:
                member.client = await self._launcher.launch(member.index)
            except ComponentFailure as error:
                member.lost_because = str(error)
            # Only now: a restart that a lost trainer has cut short is not the engine's failure.
            member.restarts += 1
            if member.client is not None:
                driver.add_engine(member.client)
                return
        if not any(o.client is not None or self._may_restart(o) for o in self._members):
            driver.background.fail(
                ComponentFailure(
                    f"no inference engine is left: {member.lost_because} (restarted "
                    f"{member.restarts} times, engines.max_restarts is "
                    f"{self._settings.max_restarts})"
                )
            )

    def _may_restart(self, member: _Member) -> bool:
        return member.restarts < self._settings.max_restarts
