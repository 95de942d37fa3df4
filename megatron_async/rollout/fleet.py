"""The engine fleet: starts engines, notices the dead, restarts them, gives up with one sentence.

Invariants
- An engine that was (re)started is handed to the driver as stale: it serves nothing before it
  holds the current weights.
- One engine is restarted at most `engines.max_restarts` times; the run goes on while one is left.
  A restart that was cut short because the trainer was lost is begun again and counts once.
- When none is left and none can be restarted, the driver fails with a sentence that says why; so
  it does when an engine cannot be mended for another reason.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from megatron_async.config.rollout import EngineConfig
from megatron_async.errors import ComponentFailure, ProcessKilled
from megatron_async.rollout.driver import RolloutDriver
from megatron_async.rollout.interfaces import EngineClient


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
        self._driver: RolloutDriver | None = None
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start all engines at once; the first that cannot start fails the run."""
        await asyncio.gather(*(self._start(member) for member in self._members))

    async def _start(self, member: _Member) -> None:
        """One that is killed on the way is started again; any other failure would come again."""
        while True:
            try:
                member.client = await self._launcher.launch(member.index)
                return
            except ProcessKilled:
                if member.restarts >= self._settings.max_restarts:
                    raise
                member.restarts += 1

    def attach(self, driver: RolloutDriver) -> None:
        """Hand every engine to `driver` as stale, and mend what it finds broken."""
        self._driver = driver
        for member in self._members:
            if member.client is not None:
                driver.add_engine(member.client)
        self._watcher = asyncio.create_task(self._watch(driver))
        self._watcher.add_done_callback(lambda task: _report_crash(driver, task))

    def detach(self) -> None:
        """Stop watching; the engines go on."""
        self._driver = None
        if self._watcher is not None:
            self._watcher.cancel()
            self._watcher = None

    async def stop(self) -> None:
        """End every engine process."""
        self.detach()
        for member in self._members:
            if member.client is not None:
                await member.client.close()
        await asyncio.gather(
            *(self._launcher.stop(m.index) for m in self._members), return_exceptions=True
        )

    async def _watch(self, driver: RolloutDriver) -> None:
        """Wait for lost engines (the driver's finding or a dead process), and mend."""
        for member in self._members:
            if member.client is None:  # the trainer before was lost while this was being mended
                await self._restart(driver, member)
        while True:
            try:
                # Not `wait_for`: until Python 3.12 it may give a result although it is cancelled.
                async with asyncio.timeout(self._settings.health_interval_seconds):
                    engine_id, why = await driver.lost_engines.get()
            except TimeoutError:
                await self._look_for_dead_processes(driver)
                continue
            for member in self._members:
                if member.client is not None and member.client.engine_id == engine_id:
                    await self._mend(driver, member, why)

    async def _look_for_dead_processes(self, driver: RolloutDriver) -> None:
        for member in self._members:
            if member.client is not None and not await self._launcher.alive(member.index):
                engine_id = member.client.engine_id
                driver.engine_failed(engine_id, f"the process of engine {engine_id} has ended")

    async def _mend(self, driver: RolloutDriver, member: _Member, why: str) -> None:
        """Restart an engine that was lost, or take it out for good."""
        # Forgotten first: a half-closed one must not be handed to the driver of the next trainer.
        client, member.client, member.lost_because = member.client, None, why
        if client is not None:
            await client.close()
        await self._restart(driver, member)

    async def _restart(self, driver: RolloutDriver, member: _Member) -> None:
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
            driver.fail(
                ComponentFailure(
                    f"no inference engine is left: {member.lost_because} (restarted "
                    f"{member.restarts} times, engines.max_restarts is "
                    f"{self._settings.max_restarts})"
                )
            )

    def _may_restart(self, member: _Member) -> bool:
        return member.restarts < self._settings.max_restarts


def _report_crash(driver: RolloutDriver, watcher: asyncio.Task[None]) -> None:
    """A fleet that nobody watches any more must end the run, not wait for the next death."""
    error = None if watcher.cancelled() else watcher.exception()
    if error is not None:
        failure = ComponentFailure(f"an engine could not be mended: {error!r}")
        failure.__cause__ = error
        driver.fail(failure)
