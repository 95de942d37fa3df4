"""The fleet from one driver to the next: which engines come back, and when the run is over."""

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
    """A client whose `close` waits for `closing`."""

    engine_id: str
    closing: asyncio.Event

    async def close(self) -> None:
        await self.closing.wait()


class Driver:
    """Records what the fleet reports to it."""

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
    """Starts fail for the engines in `broken`, and wait for good for those in `slow`."""

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
    """A fleet, its launcher and the driver of the trainer that is there now."""

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
        """The successor's driver; the restart would have taken for ever."""
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


async def test_a_successor_waits_for_the_engine_that_still_has_a_restart() -> None:
    """Engine 0 is out for good; engine 1 was being restarted when the trainer was lost."""
    it = Run(count=2, max_restarts=1)
    await it.start()
    it.launcher.broken = {0}
    it.lose_engine(0)
    driver = await it.lose_trainer_in_restart_of(1)
    await until(lambda: bool(driver.engines or driver.failures))
    assert (names(driver), driver.failures) == (["engine1"], [])
    it.driver.cancel()


async def test_when_none_is_left_every_trainer_gets_the_reason() -> None:
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


async def test_a_restart_that_a_lost_trainer_cut_short_counts_once() -> None:
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
async def test_an_engine_that_is_lost_with_the_trainer_is_not_mended_for_it(turns: int) -> None:
    """Wherever its news is, after so many turns of the event loop, when the trainer is lost."""
    it = Run(count=1, max_restarts=1)
    driver = await it.start()
    await asyncio.sleep(0.01)  # it waits for news
    it.lose_engine(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    before = len(driver.engines)
    successor = it.next_trainer()
    await asyncio.sleep(0.01)
    assert len(driver.engines) == before
    assert names(successor) == ["engine0"]
    it.driver.cancel()


async def test_an_engine_whose_connections_were_being_closed_does_not_serve_the_successor() -> None:
    it = Run(count=1, max_restarts=1)
    [half_closed] = (await it.start()).engines
    it.launcher.closing.clear()
    it.lose_engine(0)
    await asyncio.sleep(0.01)  # it waits in `close`
    driver = it.next_trainer()
    await until(lambda: bool(driver.engines))
    assert half_closed not in driver.engines and names(driver) == ["engine0"]
    it.launcher.closing.set()
    it.driver.cancel()


async def test_lost_engines_are_mended_side_by_side() -> None:
    """A lost node with four engines costs one start: all of them are under way at once."""
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
