"""A whole run, killed for real: nothing finished is lost, nothing is trained twice.

One run after another in the same directory: SIGKILL of everything mid-step, resume, then the death
of the only engine with no restart left. Simulated engines behind the real processes; what a killed
tree leaves of a run on real ones: tests/crash/test_short.py.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.store.lineage import Consumption
from megatron_async.store.reader import StoreContent, StoreReader
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.trajectory.types import Trajectory, TrajectoryState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]

GONE = (TrajectoryState.BATCHED, TrajectoryState.DROPPED)
SETTINGS = """
name: killed
steps: 40
parallel: {ranks: 2, tensor: 2}
optimizer: {lr: 1.0e-4}
schedule: {preset: copris, groups_per_batch: 4, group_size: 4, concurrency: 24}
sampling: {max_new_tokens: 192}
engines: {kind: simulated, simulated: {mean_length: 100, step_seconds: 0.01}}
weights: {transport: tensor, verify: never}
eval: {prompts: 4}
checkpoint: {every_steps: 2, export_hf: false}
telemetry: {progress: lines, trackers: []}
"""


class Run:
    """`megatron-async train` in a process of its own."""

    def __init__(self, *arguments: str, log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "megatron_async.cli", "train", *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended early:\n{self.log.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"too slow:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.2)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_everything(self) -> None:
        everyone = [psutil.Process(self.process.pid), *self.family()]
        for process in everyone:
            try:
                process.send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue
        self.process.wait(20)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    build_tiny_model(tmp_path / "model", seed=1)
    return tmp_path / "model"


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        if run.process.poll() is None:
            run.kill_everything()


def steps_done(directory: RunDirectory) -> int:
    lines = read_metrics(directory.metrics_file)
    return int(lines[-1]["step"]) + 1 if lines else 0


def response_ids(trajectory: Trajectory) -> list[int]:
    return [int(token) for segment in trajectory.segments for token in segment.token_ids]


def unfinished_business(directory: RunDirectory) -> dict[int, list[int]]:
    """Tokens of every trajectory that was neither trained on nor dropped."""
    with closing(StoreReader(directory.store_file)) as reader:
        return {
            summary.trajectory_id: response_ids(reader.trajectory(summary.trajectory_id))
            for summary in reader.summaries()
            if summary.tokens and summary.state not in GONE
        }


def test_sigkill_mid_step_then_resume_then_the_engine_dies(
    tmp_path: Path, model: Path, runs: list[Run]
) -> None:
    settings = tmp_path / "c.yaml"
    settings.write_text(SETTINGS)
    directory = RunDirectory(tmp_path / "killed")
    first = Run(
        *("--config", str(settings), f"root={tmp_path}", f"model.path={model}"),
        log=tmp_path / "first.log",
    )
    runs.append(first)
    first.wait_until(lambda: steps_done(directory) >= 3, 240)
    first.kill_everything()
    kept = unfinished_business(directory)
    assert kept, "the kill came at a moment when nothing was unfinished"
    done = steps_done(directory)

    second = Run(
        *("--resume", str(directory.path), "engines.max_restarts=0"), log=tmp_path / "second.log"
    )
    runs.append(second)
    second.wait_until(lambda: steps_done(directory) >= done + 2, 240)
    engine = next(p for p in second.family() if "engines.simulated.server" in " ".join(p.cmdline()))
    engine.send_signal(signal.SIGKILL)
    assert second.process.wait(120) == 1
    last = second.log.read_text().strip().splitlines()[-1]
    assert re.search(r"error: no inference engine is left: .*engines\.max_restarts is 0", last)

    with closing(StoreReader(directory.store_file)) as reader:
        for trajectory_id, tokens in kept.items():
            now = reader.trajectory(trajectory_id)
            lost = response_ids(now)[: len(tokens)] != tokens
            assert not lost, f"trajectory {trajectory_id} ({now.state}) lost tokens"
        assert_trained_once(directory, reader.content())


def assert_trained_once(directory: RunDirectory, content: StoreContent) -> None:
    """Along the surviving lineage each step has one batch, and no trajectory is in two of them."""
    steps = [int(line["step"]) for line in read_metrics(directory.metrics_file)]
    assert steps == list(range(len(steps)))
    consumption = Consumption.at(content.tree, content.tree.newest)
    batches = [b for b in content.batches if consumption.holds(b.lineage, b.step)]
    trained = [trajectory_id for batch in batches for trajectory_id in batch.ids()]
    assert len(trained) == len(set(trained))
    assert sorted({batch.step for batch in batches}) == sorted(batch.step for batch in batches)
