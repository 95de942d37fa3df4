"""A run through train.sbatch on a real Slurm cluster of two virtual nodes.

Two trainer ranks on one node, the engine on the other. One job lives through all that a long run
meets: the signal before its time limit, a lost node; each time it is queued again by itself, goes
on from its checkpoint, and in the end every trajectory was trained on at most once and every step
exactly once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from megatron_async.checkpoint.manifest import list_checkpoints
from megatron_async.run.directory import Outcome, RunDirectory
from megatron_async.run.launch import Cluster, launch_run
from megatron_async.tasks.tiny_model import build_tiny_model
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.trajectory.store_lineage import Consumption
from megatron_async.trajectory.store_reader import StoreReader
from tests.launch.cluster import SlurmCluster, missing_programs

MISSING = missing_programs()
WANTED = os.environ.get("MEGATRON_ASYNC_SLURM_TESTS") == "1"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not WANTED, reason="Slurm tests run with MEGATRON_ASYNC_SLURM_TESTS=1"),
    pytest.mark.skipif(bool(MISSING), reason=f"Slurm is not installed: {', '.join(MISSING)}"),
]

STEPS = 12
GROUPS, GROUP_SIZE = 4, 4
# Ray, an engine, the trainers and two steps from nothing: about a minute on two idle cores.
START_SECONDS = 300
SETTINGS = f"""
name: slurm
steps: {STEPS}
parallel: {{ranks: 2, tensor: 2}}
optimizer: {{lr: 1.0e-4}}
schedule:
  preset: copris
  groups_per_batch: {GROUPS}
  group_size: {GROUP_SIZE}
  concurrency: 24
sampling: {{max_new_tokens: 96}}
eval: {{prompts: 4}}
checkpoint: {{every_steps: 5, export_hf: false}}
store: {{chunk_tokens: 16, compact_after_checkpoints: 100}}
telemetry: {{progress: lines, tensorboard: false}}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path / "cluster") as up:
        yield up


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDirectory, Path]:
    """A run directory and its job script, as `megatron-async launch --slurm` writes it."""
    build_tiny_model(tmp_path / "model", seed=1)
    settings = tmp_path / "c.yaml"
    settings.write_text(SETTINGS)
    overrides = [f"root={tmp_path}", f"model.path={tmp_path / 'model'}"]
    nodes = Cluster(gpus_per_node=0, engine_nodes=1, time_limit="01:00:00")
    script = launch_run(settings, None, overrides, nodes, slurm=True, dry_run=True)
    launch_run(settings, None, overrides, nodes, slurm=False, dry_run=False)
    directory = RunDirectory(tmp_path / "slurm")
    job_file = directory.path / "job.sbatch"
    job_file.write_text(script)
    return directory, job_file


def steps_done(directory: RunDirectory) -> int:
    lines = read_metrics(directory.metrics_file)
    return int(lines[-1]["step"]) + 1 if lines else 0


def wait_until(condition: Callable[[], bool], seconds: float, directory: RunDirectory) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, all_logs(directory)
        time.sleep(0.3)


def all_logs(directory: RunDirectory) -> str:
    logs = sorted(directory.logs.glob("*.log"))
    return "\n".join(f"--- {path.name} ---\n{path.read_text()[-1500:]}" for path in logs)


def processes_of(directory: RunDirectory) -> list[psutil.Process]:
    """Everything that runs for this run directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(directory.path) in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


def test_preemption_and_a_lost_node_cost_no_trajectory(
    cluster: SlurmCluster, run: tuple[RunDirectory, Path]
) -> None:
    directory, job_file = run
    venv = str(Path(sys.executable).parents[1])
    began = time.monotonic()
    job = cluster.submit(job_file, environment={"MEGATRON_ASYNC_VENV": venv})

    def phase(name: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {name}")

    wait_until(lambda: steps_done(directory) >= 2, START_SECONDS, directory)
    phase("two steps done; the signal before the time limit")
    cluster.signal_batch(job, "USR1")
    wait_until(lambda: cluster.restarts(job) == 1, 120, directory)
    phase("queued again")
    saved = list_checkpoints(directory.checkpoints)[0]
    done = steps_done(directory)
    assert saved.step == done, "a step was trained on and not saved"
    assert saved.step % 5, "the checkpoint is one that was due anyway"

    wait_until(lambda: steps_done(directory) >= done + 2, START_SECONDS, directory)
    phase("resumed, two more steps; the engine's node is lost")
    cluster.set_node("n2", "down")
    wait_until(lambda: cluster.restarts(job) == 2, 120, directory)
    phase("queued again")

    cluster.wait_for(job, ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT"), START_SECONDS)
    phase("ended")
    assert cluster.state(job) == "COMPLETED", all_logs(directory)
    assert directory.outcome() is Outcome.COMPLETE
    assert_trained_once(directory)
    wait_until(lambda: not processes_of(directory), 30, directory)


def assert_trained_once(directory: RunDirectory) -> None:
    """Along the surviving line: every step once, no trajectory in two batches."""
    with closing(StoreReader(directory.store_file)) as reader:
        content = reader.content()
    consumption = Consumption.at(content.tree, content.tree.newest)
    batches = [b for b in content.batches if consumption.holds(b.lineage, b.step)]
    trained = [trajectory_id for batch in batches for trajectory_id in batch.ids()]
    assert len(trained) == len(set(trained))
    assert len(trained) == STEPS * GROUPS * GROUP_SIZE
    assert sorted(batch.step for batch in batches) == list(range(STEPS))
    lines = [line for line in read_metrics(directory.metrics_file) if "train/loss" in line]
    assert [int(line["step"]) for line in lines] == list(range(STEPS))
    assert int(lines[0]["lineage"]) == 0
    assert int(lines[-1]["lineage"]) == 2
