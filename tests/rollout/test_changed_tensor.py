"""Tests with a real engine that tokens of wrong weights never reach the store, at every preset.

The trainer does not wait for the verification of its weights: it takes batches meanwhile.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.config import build_config
from megatron_async.config.rollout import WeightsConfig
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.rollout.manager import ResumePoint, UpdateReport
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, PolicyVersion
from megatron_async.weight_sync.publisher import make_sender
from tests.engine import SETTINGS, EngineUnderTest, reference_logprobs
from tests.rollout.stand_ins import manager_of, trajectories_in

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PRESETS = ["sync", "copris", "rapid", "pipeline", "async"]
CHANGED = "model.layers.1.mlp.down_proj.weight"
RIGHT = 1e-3
"""Largest difference of a log-prob between the engine and transformers with equal weights."""


class OneEngine:
    """Launcher whose only engine is the server of the test session."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self._engine = engine

    async def launch(self, index: int) -> SGLangClient:
        return await SGLangClient.connect("engine", self._engine.process.url, SETTINGS)

    async def alive(self, index: int) -> bool:
        return True

    async def stop(self, index: int) -> None:
        return None


def logprobs(model: Any, batch: TokenBatch) -> FloatArray:
    """Return the log-probs of all tokens of the batch by transformers; 0 for first tokens, [T]."""
    starts = batch.cu_seqlens_S1[:-1]
    sequences = np.split(batch.token_ids_T, starts[1:])
    values = [np.append(0.0, reference_logprobs(model, ids.tolist())) for ids in sequences]
    return np.concatenate(values).astype(np.float32) * batch.loss_mask_T


class Trainer:
    """Trainer that calls the manager as `train_loop/loop.py` does, without training: version
    0 has the weights of model `a`, all later versions those of model `b`."""

    def __init__(self, folder: Path, preset: str, engine: EngineUnderTest) -> None:
        schedule = {"groups_per_batch": 1, "group_size": 2, "concurrency": 4}
        config = build_config(
            {
                "schedule": {"preset": preset, "updates_per_batch": 1, **schedule},
                "sampling": {"max_new_tokens": 40},
                "weights": {"transport": "tensor", "timeout_seconds": 30},
                "trainer": {"wait_for_batch_seconds": 60},
                "steps": 100,
            }
        )
        self._in_place = config.schedule.in_place
        self.manager = manager_of(folder, config, OneEngine(engine))  # type: ignore[arg-type]
        self.engine = engine
        transport = WeightsConfig(transport="tensor", timeout_seconds=30.0)
        self._sender = make_sender(transport, SETTINGS, torch.device("cpu"), folder / "weights")

    def model(self, number: int) -> str:
        return "b" if number else "a"

    async def send(self, number: int, *, changed: bool = False) -> bool:
        """Send version `number`, with one changed tensor if `changed`; return whether the trainer
        must verify it at once."""
        addresses = await self.manager.begin_update(0, number)
        tensors = [
            (name, tensor * 1.1 if changed and name == CHANGED else tensor)
            for name, tensor in self.engine.tensors(self.model(number))
        ]
        assert not changed or CHANGED in dict(tensors)
        if addresses:
            self._sender.connect(addresses)
            # As in `WeightPublisher`: engines with requests cannot flush their cache.
            flush = not self._in_place
            version = PolicyVersion(0, number)
            await asyncio.to_thread(self._sender.send, iter([tensors]), version, flush)
        ids = [address.engine_id for address in addresses]
        return await self.manager.end_update(0, number, ids, True)

    async def verify(self, number: int) -> UpdateReport:
        samples = await self.manager.verification_samples(0, number)
        assert samples is not None
        found = logprobs(self.engine.models[self.model(number)], samples)
        return await self.manager.verify_update(0, number, found, True)

    async def close(self) -> None:
        await self.manager.stop()
        self._sender.close()


@pytest.mark.parametrize("preset", PRESETS)
async def test_no_token_is_stored_when_one_tensor_of_the_engine_is_changed(
    preset: str, sglang_engine: EngineUnderTest, tmp_path: Path
) -> None:
    sglang_engine.reset_to("a")
    trainer = Trainer(tmp_path, preset, sglang_engine)
    manager = trainer.manager
    await manager.start()
    await manager.attach(ResumePoint(0))
    await trainer.send(0)
    assert (await trainer.verify(0)).passed
    assert isinstance(await manager.next_batch(0), TokenBatch)
    assert not await trainer.send(1, changed=True), "the trainer must not wait"
    number = 1
    if isinstance(await manager.next_batch(0), TokenBatch):
        number = 2  # The trainer verifies version 1 before it applies this batch's gradient.
    await manager.verification_samples(0, 1)
    await asyncio.sleep(0.5)  # Meanwhile the engine generates with the changed tensor.
    report = await trainer.verify(1)
    assert not report.passed and report.metrics["weights/probe_mean_error"] > 1e-3
    if number == 1:
        assert await manager.next_batch(0) is TrainerTask.SEND_WEIGHTS
    for following in range(number, number + 3):
        await trainer.send(following)
        assert (await trainer.verify(following)).passed
        assert isinstance(await manager.next_batch(0), TokenBatch)
    await trainer.close()

    errors: dict[int, float] = {}
    for trajectory in trajectories_in(tmp_path).values():
        ids = trajectory.prompt.token_ids.tolist()
        for segment in trajectory.segments:
            number, start = segment.version.number, len(ids)
            ids += segment.token_ids.tolist()
            model = sglang_engine.models[trainer.model(number)]
            expected = reference_logprobs(model, ids)[start - 1 :]
            error = float(np.abs(segment.logprobs - expected).max())
            errors[number] = max(errors.get(number, 0.0), error)
    assert len(errors) > 1 and max(errors.values()) < RIGHT, errors
