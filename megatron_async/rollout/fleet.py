"""Provides the fleet of inference engines: it starts engines, detects dead engines and restarts
them.

Invariants
- Engines are restarted concurrently, so when a node is lost with all its engines, restarting them
  takes only as long as one start.
- An engine that was started or restarted is handed to the driver as stale: it serves no requests
  before it has loaded the current weights.
- Each engine is restarted at most `engines.max_restarts` times. The run continues while at least
  one engine is left. If a restart is interrupted because the trainer was lost, it is repeated for
  the next trainer, and both attempts count as one restart.
- If no engine is left and none may be restarted, the run ends with an error that says why the last
  engine was lost.
"""

import asyncio
from dataclasses import dataclass
from typing import Protocol

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineClient
from megatron_async.errors import ComponentFailure, ProcessKilled
from megatron_async.rollout.driver import RolloutDriver


class EngineLauncher(Protocol):
    """Starts, checks and stops the process of engine number `index`.

    Every call has a time limit and raises ComponentFailure if it fails.
    """

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
    """All engines of a run, and how often each was restarted. Each trainer that connects has a
    separate driver; the fleet is handed from one driver to the next."""

    def __init__(self, settings: EngineConfig, launcher: EngineLauncher) -> None:
        self._settings = settings
        self._launcher = launcher
        self._members = [_Member(index) for index in range(settings.count)]

    async def start(self) -> None:
        """Start all engines concurrently and wait until they run.

        Raises:
            ComponentFailure: An engine cannot be started.
        """
        await asyncio.gather(*(self._start(member) for member in self._members))

    async def _start(self, member: _Member) -> None:
        """Start one engine, and start it again if its process is killed during the start, up to
        `engines.max_restarts` times.

        Any other failure is raised, because it would recur at the next start.
        """
        while True:
            try:
                member.client = await self._launcher.launch(member.index)
                return
            except ProcessKilled:
                if member.restarts >= self._settings.max_restarts:
                    raise
                member.restarts += 1

    def attach(self, driver: RolloutDriver) -> None:
        """Hand every engine to `driver` as stale, and watch and restart dead engines until the
        driver closes."""
        for member in self._members:
            if member.client is not None:
                driver.add_engine(member.client)
        for member in self._members:
            # The previous driver was closed while it restarted this engine, so this driver must
            # repeat the restart.
            if member.client is None:
                driver.background.spawn(self._restart(driver, member))
        driver.background.spawn(self._restart_lost(driver))
        driver.background.spawn(self._detect_dead_processes(driver))

    async def stop(self) -> None:
        """Close the clients of all engines and stop the engine processes.

        No driver may use the engines any more.
        """
        for member in self._members:
            if member.client is not None:
                await member.client.close()
        await asyncio.gather(
            *(self._launcher.stop(m.index) for m in self._members), return_exceptions=True
        )

    async def _restart_lost(self, driver: RolloutDriver) -> None:
        """Restart each engine that `driver` takes out of service, as soon as the driver reports
        it."""
        while True:
            engine_id, why = await driver.lost_engines.get()
            for member in self._members:
                if member.client is not None and member.client.engine_id == engine_id:
                    # `member.client` is set to None before `_restart` closes the client, so that
                    # `attach` never hands a client that is being closed to the next driver.
                    client, member.client, member.lost_because = member.client, None, why
                    driver.background.spawn(self._restart(driver, member, client))

    async def _detect_dead_processes(self, driver: RolloutDriver) -> None:
        while True:
            await asyncio.sleep(self._settings.health_interval_seconds)
            await asyncio.gather(*(self._check_process(driver, member) for member in self._members))

    async def _check_process(self, driver: RolloutDriver, member: _Member) -> None:
        client = member.client
        if client is None or await self._launcher.alive(member.index):
            return
        # Different if the engine was restarted during the check; the result is then about the old
        # process.
        if member.client is client:
            engine_id = client.engine_id
            driver.engine_failed(engine_id, f"the process of engine {engine_id} has ended")

    async def _restart(
        self, driver: RolloutDriver, member: _Member, lost: EngineClient | None = None
    ) -> None:
        """Stop an engine's process and restart it, or fail the run if no engine is left and none
        may be restarted.

        Args:
            lost: Client of the engine that was lost, to be closed; None if it is closed already.
        """
        if lost is not None:
            await lost.close()
        await self._launcher.stop(member.index)
        while self._may_restart(member):
            try:
                member.client = await self._launcher.launch(member.index)
            except ComponentFailure as error:
                member.lost_because = str(error)
            # Counted only after the launch. If the trainer is lost during it, this task is canceled
            # before it counts, because the interruption is not the engine's fault.
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
