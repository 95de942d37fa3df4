"""Tests engines that share the trainer's devices: they are loaded only while the trainer uses no
device memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.engines.interface import PauseMode
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.errors import UserError
from megatron_async.rollout.manager import ResumePoint
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion
from tests.rollout.stand_ins import MODEL, Engines, manager_of, trainer_logprobs

ALL = frozenset({"weights", "rest"})


class MemoryEngine(SimulatedEngine):
    """Simulated engine that records the device memory it has and the calls it got."""

    def __init__(self, engine_id: str) -> None:
        super().__init__(engine_id, MODEL)
        self.memory = ALL
        self.calls: list[str] = []

    async def pause(self, mode: PauseMode) -> None:
        self.calls.append(f"pause {mode}")
        await super().pause(mode)

    async def resume(self) -> None:
        assert self.memory == ALL, "an engine without memory was resumed"
        self.calls.append("resume")
        await super().resume()

    async def release_memory(self, *, keep_weights: bool = False) -> None:
        await super().release_memory()
        self.calls.append("release all but weights" if keep_weights else "release")
        self.memory = self.memory & {"weights"} if keep_weights else frozenset()

    async def resume_memory(self, *, weights_only: bool) -> None:
        await super().resume_memory(weights_only=weights_only)
        self.calls.append("weights" if weights_only else "all")
        self.memory = self.memory | {"weights"} if weights_only else ALL


class MemoryEngines(Engines):
    async def launch(self, index: int) -> SimulatedEngine:
        self.all.append(MemoryEngine(f"engine{len(self.all)}"))
        return self.all[-1]


def settings(preset: str, **engines: Any) -> RunConfig:
    return build_config(
        {
            "schedule": {
                "preset": preset,
                "groups_per_batch": 2,
                "group_size": 2,
                "concurrency": 8,
                "updates_per_batch": 1,
            },
            "steps": 3,
            "parallel": {"ranks": engines.get("count", 1)},
            "trainer": {"wait_for_batch_seconds": 5},
            "engines": {"placement": "colocated", **engines},
            "eval": {"prompts": 2},
            "weights": {"transport": "tensor", "timeout_seconds": 5},
        }
    )


class Run:
    """Manager with engines, and the calls of its trainer."""

    def __init__(self, folder: Path, config: RunConfig, verify: bool = True) -> None:
        self.launcher = MemoryEngines()
        self.verify = verify
        self.manager = manager_of(folder, config, self.launcher)

    @property
    def engines(self) -> list[MemoryEngine]:
        return self.launcher.all  # type: ignore[return-value]

    async def begin(self) -> None:
        await self.manager.start()
        await self.manager.attach(ResumePoint(0))

    def all_have(self, memory: frozenset[str]) -> bool:
        return all(engine.memory == memory for engine in self.engines)

    async def publish(self, number: int) -> None:
        addresses = await self.manager.begin_update(0, number)
        assert self.all_have(frozenset({"weights"})), (
            "the trainer's weights are still on the devices"
        )
        assert len(addresses) == len(self.engines), "an engine without weights was left out"
        for engine in self.engines:
            engine.set_weights(PolicyVersion(0, number))
        ids = [address.engine_id for address in addresses]
        assert await self.manager.end_update(0, number, ids, self.verify), "it must wait"
        samples = await self.manager.verification_samples(0, number)
        logprobs_T = None
        if samples is not None:
            assert self.all_have(frozenset({"weights"})), "the trainer is computing"
            logprobs_T = trainer_logprobs(samples)
        if (await self.manager.verify_update(0, number, logprobs_T, True)).evaluation_due:
            await self.manager.evaluate(0, number)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("preset", ["rapid", "sync", "copris"])
async def test_engines_are_offloaded_whenever_the_trainer_works(
    tmp_path: Path, preset: str, verify: bool
) -> None:
    it = Run(tmp_path, settings(preset, count=2), verify)
    await it.begin()
    assert it.all_have(frozenset()), "the trainer is being built"
    await it.publish(0)
    for step in range(3):
        assert it.all_have(ALL)
        batch = await it.manager.next_batch(0)
        assert isinstance(batch, TokenBatch) and batch.step == step
        assert it.all_have(frozenset()), "the trainer is training"
        await it.manager.position(0)
        await it.publish(step + 1)
    assert it.all_have(frozenset()), "the trainer exports after the last step"
    for engine in it.engines:
        assert engine.calls[:5] == ["pause retract", "release", "weights", "all", "resume"]
    await it.manager.stop()


async def test_engines_are_offloaded_when_a_checkpoint_interrupts_generation(
    tmp_path: Path,
) -> None:
    """A run that is asked to stop keeps what it has generated, and the trainer gets the memory."""
    it = Run(tmp_path, settings("rapid"))
    await it.begin()
    await it.publish(0)
    assert it.all_have(ALL)
    await it.manager.position(0)
    assert it.all_have(frozenset())
    await it.manager.stop()


async def test_restarted_engine_is_offloaded_with_the_others_before_an_update(
    tmp_path: Path,
) -> None:
    it = Run(tmp_path, settings("rapid", count=2))
    await it.begin()
    await it.publish(0)
    it.engines[1].crash()
    while len(it.launcher.all) < 3:
        await asyncio.sleep(0.01)
    del it.launcher.all[1]
    batch = await it.manager.next_batch(0)
    if batch is TrainerTask.SEND_WEIGHTS:  # The restarted engine was reported before the batch.
        await it.publish(0)
        batch = await it.manager.next_batch(0)
    assert isinstance(batch, TokenBatch)
    assert it.all_have(frozenset())
    await it.publish(1)
    assert it.all_have(ALL)
    await it.manager.stop()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schedule": {"preset": "async"}}, r"schedule\.overlap False, got True"),
        ({"weights": {"transport": "disk"}}, r"weights\.transport tensor, got disk"),
        ({"parallel": {"ranks": 2, "nodes": 2}}, r"parallel\.nodes 1, got 2"),
    ],
)
def test_settings_are_refused_when_they_contradict_colocated_engines(
    changes: dict[str, Any], message: str
) -> None:
    base: dict[str, Any] = {
        "schedule": {"preset": "rapid"},
        "engines": {"placement": "colocated"},
        "weights": {"transport": "tensor"},
    }
    with pytest.raises(UserError, match=message):
        build_config({**base, **changes})
