"""Metrics of a live driver's batches, also a resumed one's: lag, waste, load, warnings."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.engines.interface import EngineStatus
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.errors import ComponentFailure
from megatron_async.rollout import admission
from megatron_async.rollout.manager import ResumePoint
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import Prompt, TrajectoryState
from tests.rollout.stand_ins import Fixed, settings
from tests.rollout.test_manager import Trainer

BATCH = 2
STRAGGLER = 2
"""The trajectory that is still written when all others of its time have been trained."""


def changed(preset: str, **changes: Any) -> RunConfig:
    return build_config(merge(settings(preset).model_dump(), changes))


def with_straggler() -> RunConfig:
    lengths = [4] * 64
    lengths[STRAGGLER] = 60
    return changed(
        "copris", sampling={"max_new_tokens": 64}, experiment={"forced_lengths": lengths}
    )


def lag_in_samples(batch: TokenBatch) -> list[int]:
    """Counted anew: every batch has trained `BATCH` samples."""
    index_T = np.repeat(np.arange(batch.num_sequences), batch.lengths_S())
    trained_T = batch.loss_mask_T > 0
    oldest = [batch.version_T[trained_T & (index_T == s)].min() for s in range(batch.num_sequences)]
    return [int(BATCH * (batch.step - version)) for version in oldest]


@pytest.mark.parametrize("resumed_at", [None, 3])
async def test_lag_counts_the_samples_trained_since_a_trajectory_began(
    tmp_path: Path, resumed_at: int | None
) -> None:
    batches: list[TokenBatch] = []
    config = with_straggler()

    async def train(trainer: Trainer, lineage: int, step: int) -> None:
        batches.append(await trainer.batch())
        await trainer.publish(lineage, step + 1)

    trainer, lineage, step = Trainer(tmp_path, config), 0, 0
    await trainer.manager.start()
    await trainer.begin(ResumePoint(0))
    while not batches or STRAGGLER not in batches[-1].trajectory_ids_S:
        await train(trainer, lineage, step)
        step += 1
        if step == resumed_at:
            position = (await trainer.manager.position(0))["store_position"]
            await trainer.manager.checkpoint_finalised(0, step, [step])
            await trainer.manager.stop()
            trainer, lineage = Trainer(tmp_path, config), 1
            await trainer.manager.start()
            await trainer.begin(ResumePoint(1, step, parent=0, store_position=position))
    await trainer.manager.stop()
    assert len(batches) > 5, "it is trained after a resume, and began before it"
    for batch in batches:
        expected = lag_in_samples(batch)
        assert batch.extra_metrics["rollout/lag_samples_mean"] == np.mean(expected)
        assert batch.extra_metrics["rollout/lag_samples_max"] == max(expected)
    assert max(lag_in_samples(batches[-1])) == BATCH * batches[-1].step, "it began under version 0"


class EveryOtherGroup(Fixed):
    """Both answers of a group get the same reward, or only the first one is right, in turns."""

    def __init__(self) -> None:
        self._asked: dict[int, int] = {}

    async def score(self, prompt: Prompt, response_ids: Any) -> tuple[float, dict[str, float]]:
        number = int(prompt.token_ids[1])
        before = self._asked.setdefault(number, 0)
        self._asked[number] += 1
        return float(number % 2 == 0 or before == 0), {}


async def test_what_was_generated_for_groups_without_reward_variance_is_counted(
    tmp_path: Path,
) -> None:
    batches: list[TokenBatch] = []

    trainer = await Trainer(
        tmp_path, changed("sync", schedule={"dynamic_sampling": True}), EveryOtherGroup()
    ).started()
    for step in range(3):
        batches.append(await trainer.batch())
        if step < 2:
            await trainer.publish(0, step + 1)
    await trainer.manager.stop()
    with closing(StoreReader(tmp_path / "store.sqlite")) as reader:
        dropped = [
            reader.trajectory(entry.trajectory_id).response_length
            for entry in reader.summaries()
            if entry.state is TrajectoryState.DROPPED
        ]
    assert len(dropped) == 3 * BATCH

    def total(name: str) -> float:
        return sum(batch.extra_metrics[f"rollout/{name}"] for batch in batches)

    assert total("filtered_tokens") == total("wasted_tokens") == sum(dropped) > 0
    assert total("dropped_filtered") == len(dropped)


async def test_a_run_in_which_every_group_is_filtered_stops_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Fixed` gives every response the same reward."""
    monkeypatch.setattr(admission, "MAX_FILTERED_ROUNDS", 3)
    config = changed("sync", schedule={"dynamic_sampling": True})

    trainer = await Trainer(tmp_path, config).started()
    with pytest.raises(ComponentFailure, match=r"dropped the last 6 responses \(3 batches' w"):
        await trainer.batch()
    assert "all_filtered" in trainer.manager.status()["warnings"]
    await trainer.manager.stop()


class Storming(SimulatedEngine):
    """Reports that it has preempted `preempted` more requests at every report."""

    preempted = 0
    reports = 0

    async def status(self) -> EngineStatus:
        status = await super().status()
        self.reports += 1
        return replace(
            status, kv_usage=0.75, preemptions_total=1000 + self.preempted * self.reports
        )


@pytest.mark.parametrize("preempted", [0, 9])
async def test_the_engines_load_and_what_is_wrong_with_it_reach_the_trainer(
    tmp_path: Path, preempted: int
) -> None:
    """1,000 preemptions that it counted for somebody else before are no news."""
    warnings: list[tuple[str, str]] = []

    config = changed("copris")
    trainer = Trainer(tmp_path, config)
    await trainer.manager.start()
    engine = trainer.engines.all[0]
    engine.__class__ = Storming
    assert isinstance(engine, Storming)
    engine.preempted = preempted
    await trainer.begin(ResumePoint(0))
    while engine.reports < 6:
        await asyncio.sleep(0.01)
    batches = [await trainer.batch()]
    warnings.extend((await trainer.publish(0, 1)).warnings)
    batches.append(await trainer.batch())
    repeated = len((await trainer.publish(0, 2)).warnings)
    assert repeated == 0, "each warning is handed out once"
    metrics = batches[1].extra_metrics  # the first may be older than the first report
    assert metrics["rollout/kv_usage"] == 0.75
    assert metrics["rollout/concurrency"] == 4
    seen = sum(batch.extra_metrics["rollout/preemptions"] for batch in batches)
    assert seen % 9 == 0 and (seen > 0) == (preempted > 0)
    assert seen < 1000
    await trainer.manager.stop()
    assert [name for name, _ in warnings] == (["recomputation_storm"] if preempted else [])


async def test_warnings_come_with_the_next_update_whatever_asked_for_it(tmp_path: Path) -> None:
    trainer = await Trainer(tmp_path, settings("copris", engines=2, max_restarts=1)).started()
    trainer.engines.all[1].crash("injected crash")
    warnings: tuple[tuple[str, str], ...] = ()
    while not warnings:
        await trainer.manager.next_batch(0)
        warnings = (await trainer.publish(0, 1)).warnings
    assert [name for name, _ in warnings] == ["engine_failed"]
    assert "the process of engine engine1 has ended" in warnings[0][1]
    await trainer.manager.stop()
