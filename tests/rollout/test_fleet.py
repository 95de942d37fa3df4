"""Tests the fleet across drivers: which engines are restarted, and when the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from megatron_async.config.rollout import EngineConfig
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.fleet import Fleet


@dataclass(frozen=True, eq=False)
class Engine:
    """Engine client whose `close` waits for the event `closing`."""

    engine_id: str
    closing: asyncio.Event

    async def close(self) -> None:
        await self.closing.wait()


class Driver:
    """Stand-in for a driver that records what the fleet reports to it."""

    def __init__(self) -> None:
        self.engines: list[Engine] = []
        self.failures: list[str] = []
        self.lost_engines: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.background = self
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.create_task(work))

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()

    def add_engine(self, client: Engine) -> None:
        self.engines.append(client)

    def engine_failed(self, engine_id: str, why: str) -> None:
        self.lost_engines.put_nowait((engine_id, why))

    def fail(self, failure: ComponentFailure) -> None:
        self.failures.append(str(failure))


class Launcher:
    """Launcher whose launches fail for the engines in `broken` and never end for those in
    `slow`."""

    def __init__(self) -> None:
        self.broken: set[int] = set()
        self.slow: set[int] = set()
        self.waiting = 0
        self.closing = asyncio.Event()
        self.closing.set()

    async def launch(self, index: int) -> Engine:
        if index in self.broken:
            raise ComponentFailure(f"no start of engine {index}")
        if index in self.slow:
            self.waiting += 1
            await asyncio.Event().wait()
        return Engine(f"engine{index}", self.closing)

    async def alive(self, index: int) -> bool:
        return True

    async def stop(self, index: int) -> None:
        return None


class Run:
    """A fleet, its launcher, and the driver of the current trainer."""

    def __init__(self, count: int, max_restarts: int) -> None:
        self.launcher = Launcher()
        self.fleet: Any = Fleet(EngineConfig(count=count, max_restarts=max_restarts), self.launcher)
        self.driver = Driver()

    async def start(self) -> Driver:
        await self.fleet.start()
        self.fleet.attach(self.driver)
        return self.driver

    def lose_engine(self, index: int) -> None:
        self.driver.engine_failed(f"engine{index}", f"engine{index} died")

    def next_trainer(self) -> Driver:
        self.driver.cancel()
        self.driver = Driver()
        self.fleet.attach(self.driver)
        return self.driver

    async def lose_trainer_in_restart_of(self, index: int) -> Driver:
        """Lose an engine and then, during its restart, the trainer; return the next trainer's
        driver."""
        self.launcher.slow = {index}
        waiting = self.launcher.waiting
        self.lose_engine(index)
        await until(lambda: self.launcher.waiting > waiting)
        self.launcher.slow = set()
        return self.next_trainer()


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not reached():
            await asyncio.sleep(0)


def names(driver: Driver) -> list[str]:
    return sorted(engine.engine_id for engine in driver.engines)


async def test_next_trainer_waits_when_an_engine_may_still_be_restarted() -> None:
    """Engine 0 has no restarts left. Engine 1 was being restarted when the trainer was lost."""
    it = Run(count=2, max_restarts=1)
    await it.start()
    it.launcher.broken = {0}
    it.lose_engine(0)
    driver = await it.lose_trainer_in_restart_of(1)
    await until(lambda: bool(driver.engines or driver.failures))
    assert (names(driver), driver.failures) == (["engine1"], [])
    it.driver.cancel()


async def test_every_trainer_gets_the_reason_when_no_engine_is_left() -> None:
    it = Run(count=2, max_restarts=1)
    driver = await it.start()
    it.launcher.broken = {0, 1}
    it.lose_engine(0)
    it.lose_engine(1)
    await until(lambda: bool(driver.failures))
    assert driver.failures == [
        "no inference engine is left: no start of engine 1 (restarted 1 times, "
        "engines.max_restarts is 1)"
    ]
    successor = it.next_trainer()
    await until(lambda: bool(successor.failures))
    assert "no inference engine is left: no start of engine" in successor.failures[0]
    it.driver.cancel()


async def test_restart_counts_once_when_trainers_were_lost_during_it() -> None:
    it = Run(count=1, max_restarts=1)
    await it.start()
    for _ in range(3):
        driver = await it.lose_trainer_in_restart_of(0)
        it.launcher.slow = {0}
    it.launcher.slow = set()
    await until(lambda: bool(driver.engines or driver.failures))
    assert (names(driver), driver.failures) == (["engine0"], [])
    it.lose_engine(0)
    await until(lambda: bool(driver.failures))
    assert "engine0 died (restarted 1 times" in driver.failures[0]
    it.driver.cancel()


@pytest.mark.parametrize("turns", range(5))
async def test_engine_is_not_restarted_for_a_trainer_when_both_are_lost(turns: int) -> None:
    """The trainer is lost some iterations of the event loop after the engine, at different stages
    of the report."""
    it = Run(count=1, max_restarts=1)
    driver = await it.start()
    await asyncio.sleep(0.01)  # The fleet waits for lost engines.
    it.lose_engine(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    before = len(driver.engines)
    successor = it.next_trainer()
    await asyncio.sleep(0.01)
    assert len(driver.engines) == before
    assert names(successor) == ["engine0"]
    it.driver.cancel()


async def test_next_trainer_gets_a_new_client_when_the_old_one_was_closing() -> None:
    it = Run(count=1, max_restarts=1)
    [half_closed] = (await it.start()).engines
    it.launcher.closing.clear()
    it.lose_engine(0)
    await asyncio.sleep(0.01)  # The fleet waits in the client's `close`.
    driver = it.next_trainer()
    await until(lambda: bool(driver.engines))
    assert half_closed not in driver.engines and names(driver) == ["engine0"]
    it.launcher.closing.set()
    it.driver.cancel()


async def test_lost_engines_are_restarted_concurrently() -> None:
    """The loss of a node with four engines costs the time of one start, because all four start at
    once."""
    it = Run(count=4, max_restarts=1)
    driver = await it.start()
    it.launcher.slow = {0, 1, 2, 3}
    for index in range(4):
        it.lose_engine(index)
    await until(lambda: it.launcher.waiting == 4)
    it.launcher.slow = set()
    successor = it.next_trainer()
    await until(lambda: len(successor.engines) == 4)
    assert driver.failures == successor.failures == []
    it.driver.cancel()
