"""An engine that fails the check of its weights gets them once more, and is replaced after that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_async.config import RunConfig
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.manager import ResumePoint, UpdateReport
from megatron_async.trajectory.types import FloatArray, IntArray, PolicyVersion
from tests.rollout.stand_ins import MODEL, Engines, manager_of, run, settings

PROBE = np.array([5, 6, 7, 8], np.int32)


class WrongEngine(SimulatedEngine):
    """Lies so many times in one of the three answers that are checked."""

    def __init__(self, engine_id: str, lie: str, times: int) -> None:
        super().__init__(engine_id, MODEL)
        self._lie = lie
        self._times = times

    def _lies(self, about: str) -> bool:
        if about != self._lie or self._times == 0:
            return False
        self._times -= 1
        return True

    async def score(self, token_ids: IntArray) -> FloatArray:
        return await super().score(token_ids) + np.float32(self._lies("probe"))

    async def checksum(self) -> str:
        return "another" if self._lies("checksum") else await super().checksum()

    async def version(self) -> PolicyVersion:
        held = await super().version()
        return PolicyVersion(held.lineage, held.number + 7) if self._lies("version") else held


class WrongEngines(Engines):
    """Engine 0 lies as often as `times[0]` says, the one that replaces it `times[1]`, ..."""

    def __init__(self, lie: str, times: list[int]) -> None:
        super().__init__()
        self._lie = lie
        self._left = list(times)
        self.now: dict[int, SimulatedEngine] = {}

    async def launch(self, index: int) -> SimulatedEngine:
        times = self._left.pop(0) if index == 0 and self._left else 0
        engine = WrongEngine(f"engine{index}.{len(self.all)}", self._lie, times)
        self.all.append(engine)
        self.now[index] = engine
        return engine

    async def alive(self, index: int) -> bool:
        return await self.now[index].healthy()


class Run:
    def __init__(self, folder: Path, config: RunConfig, engines: WrongEngines) -> None:
        self.engines = engines
        self.manager = manager_of(folder, config, engines)

    async def publish(self, number: int) -> UpdateReport:
        addresses = await self.manager.begin_update(0, number)
        for engine in self.engines.now.values():
            engine.set_weights(PolicyVersion(0, number), f"weights {number}")
        expected = await SimulatedEngine("trainer", MODEL).score(PROBE)
        ids = [address.engine_id for address in addresses]
        return await self.manager.end_update(0, number, ids, PROBE, expected)

    async def train(self, steps: int) -> int:
        """As the trainer's loop does; the number of publications."""
        await self.manager.start()
        await self.manager.attach(ResumePoint(0))
        await self.publish(0)
        done, published = 0, 1
        while done < steps:
            if await self.manager.next_batch(0) is not None:
                done += 1
            await self.publish(done)
            published += 1
        return published

    @property
    def up(self) -> list[str]:
        stale = self.manager._driver.stale_engines()
        return [e.engine_id for e in self.manager._driver.engines() if e not in stale]


def restarting(engines: int) -> RunConfig:
    config = settings("async", engines)
    return config.model_copy(
        update={"engines": config.engines.model_copy(update={"max_restarts": 1})}
    )


@pytest.mark.parametrize("lie", ["probe", "version"])
def test_after_one_mismatch_the_update_is_repeated_and_the_engine_serves(
    tmp_path: Path, lie: str
) -> None:
    async def body() -> None:
        it = Run(tmp_path, restarting(1), WrongEngines(lie, [1]))
        assert await it.train(3) == 5, "one of them twice"
        assert it.up == ["engine0.0"]
        await it.manager.stop()

    run(body())


@pytest.mark.parametrize("lie", ["probe", "version"])
def test_after_the_second_the_engine_is_replaced(tmp_path: Path, lie: str) -> None:
    async def body() -> None:
        it = Run(tmp_path, restarting(1), WrongEngines(lie, [2]))
        await it.train(2)
        assert it.up == ["engine0.1"]
        await it.manager.stop()

    run(body())


def test_one_of_three_that_differs_is_the_one_that_is_doubted(tmp_path: Path) -> None:
    async def body() -> None:
        it = Run(tmp_path, restarting(3), WrongEngines("checksum", [2]))
        await it.train(3)
        assert len(it.up) == 3 and "engine0.0" not in it.up
        assert {"engine1.1", "engine2.2"} <= set(it.up)
        await it.manager.stop()

    run(body())


def test_of_two_that_differ_neither_is_believed(tmp_path: Path) -> None:
    async def body() -> None:
        it = Run(tmp_path, restarting(2), WrongEngines("checksum", [1]))
        await it.manager.start()
        await it.manager.attach(ResumePoint(0))
        await it.publish(0)
        assert it.up == []
        await it.publish(0)
        assert len(it.up) == 2
        await it.manager.stop()

    run(body())


def test_the_run_ends_with_the_reason_when_no_engine_ever_passes(tmp_path: Path) -> None:
    async def body() -> None:
        it = Run(tmp_path, restarting(1), WrongEngines("probe", [99, 99]))
        with pytest.raises(ComponentFailure, match=r"no inference engine is left: .*probe_toler"):
            await it.train(2)
        await it.manager.stop()

    run(body())


def test_a_mismatch_after_the_last_step_is_an_error(tmp_path: Path) -> None:
    async def body() -> None:
        config = restarting(1).model_copy(update={"steps": 0})
        it = Run(tmp_path, config, WrongEngines("probe", [1]))
        await it.manager.start()
        await it.manager.attach(ResumePoint(0))
        with pytest.raises(ComponentFailure, match="no engine holds the last version"):
            await it.publish(0)
        await it.manager.stop()

    run(body())
