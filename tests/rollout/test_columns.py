"""Tests that a token column declared in one line passes from an engine to a batch, also when the
run is killed.

The simulated engine writes each token's id into every value, so a value stored at another token is
noticed. That the columns of a batch reach a loss is tested in tests/trainer/test_one_upload.py.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.engines.interface import EngineClient
from megatron_async.engines.relay import Pace, RelayedEngine, StreamRelay
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.engines.token_report import TokenReport
from megatron_async.rollout.messages import ResumePoint
from megatron_async.store import buffers
from megatron_async.store.export import find
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import Trajectory, TrajectoryState
from tests.rollout.stand_ins import MODEL, Engines, run, settings
from tests.rollout.test_manager import Trainer

ROUTES = np.dtype([("routes", "<i2", (2, 4))])

LENGTH = 40
STORE_FILE = "store.sqlite"


class Relay(StreamRelay):
    """Relay whose reports are pickled, as if they came from another process."""

    async def update(self, started, canceled):  # type: ignore[no-untyped-def, override]
        super().update(started, canceled)

    async def report(self, acknowledged: Sequence[int]) -> TokenReport:
        return pickle.loads(pickle.dumps(await super().report(acknowledged)))  # type: ignore[no-any-return]


class RoutingEngines(Engines):
    """Launcher of engines that report routes and are read through relays."""

    async def launch(self, index: int) -> EngineClient:  # type: ignore[override]
        model = replace(MODEL, mean_length=10**9, columns=(ROUTES,))
        engine = SimulatedEngine(f"engine{index}", model)
        self.all.append(engine)
        return RelayedEngine(engine, Relay(engine, 4), Pace())  # type: ignore[arg-type]


def config() -> RunConfig:
    changes = {
        "store": {"compact_after_checkpoints": 1},
        "sampling": {"max_new_tokens": LENGTH},
    }
    return build_config(merge(settings("copris").model_dump(), changes))


def live_until_killed(folder: Path) -> None:
    """Train a step, then die by SIGKILL while tokens of running trajectories are in the store."""
    buffers.CHUNK_TOKENS = 4

    async def body() -> None:
        trainer = await Trainer(folder, config(), engines=RoutingEngines()).started()
        await trainer.batch()
        await trainer.publish(0, 1)
        position = (await trainer.manager.position(0))["store_position"]
        await trainer.manager.checkpoint_finalized(0, 1, [])
        print(json.dumps({"position": position}), flush=True)
        with closing(StoreReader(folder / STORE_FILE)) as reader:
            for step in itertools.count(1):  # After each batch another group may start.
                await trainer.batch()
                await trainer.publish(0, step + 1)
                for _ in range(LENGTH):
                    await asyncio.sleep(0.002)
                    running = reader.summaries(TrajectoryState.RUNNING)
                    if any(0 < found.tokens < LENGTH for found in running):
                        os.kill(os.getpid(), signal.SIGKILL)

    run(body())


def expected(token_ids: np.ndarray) -> np.ndarray:
    """Return the expected routes: both bytes of each value are the token's id."""
    return np.broadcast_to(257 * token_ids[:, None, None], (len(token_ids), 2, 4))


def check(trajectory: Trajectory) -> None:
    assert trajectory.segments
    for segment in trajectory.segments:
        [column] = segment.columns
        assert column.dtype == ROUTES
        np.testing.assert_array_equal(column["routes"], expected(segment.token_ids))


def test_token_column_reaches_a_batch_from_the_engine_when_the_run_is_killed(
    tmp_path: Path,
) -> None:
    command = f"from {__name__} import *; live_until_killed(Path({str(tmp_path)!r}))"
    life = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert life.returncode == -signal.SIGKILL, life.stderr
    position = json.loads(life.stdout)["position"]
    with closing(StoreReader(tmp_path / STORE_FILE)) as reader:
        unfinished = [summary for summary in reader.summaries() if summary.tokens]
        assert any(summary.tokens < LENGTH for summary in unfinished)
        for summary in unfinished:
            found = reader.trajectory(summary.trajectory_id)
            check(found)
            assert found.response_length == summary.tokens
    batches: list[TokenBatch] = []

    async def body() -> None:
        trainer = Trainer(tmp_path, config(), engines=RoutingEngines())
        await trainer.manager.start()
        await trainer.begin(ResumePoint(1, 1, parent=0, store_position=position))
        for step in range(1, 4):
            batches.append(await trainer.batch())
            await trainer.publish(1, step + 1)
        await trainer.manager.checkpoint_finalized(1, 4, [])
        await trainer.manager.stop()

    run(body())
    assert any(batch.resumed_S.any() for batch in batches)
    for batch in batches:
        by_policy_T = (batch.version_T >= 0)[:, None, None]
        assert batch.columns["routes"].dtype == np.int16
        np.testing.assert_array_equal(
            batch.columns["routes"], expected(batch.token_ids_T) * by_policy_T
        )
    with closing(StoreReader(tmp_path / STORE_FILE)) as reader:
        trained = [int(i) for batch in batches for i in batch.trajectory_ids_S]
        assert not any(reader.contains(i) for i in trained)
        for i in trained:
            check(find(reader, i))
