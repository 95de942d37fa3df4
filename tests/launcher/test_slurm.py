"""Tests a run through train.sbatch on a real Slurm cluster of two virtual nodes.

Two trainer ranks run on one node, and the engine runs on the other. One job experiences the typical
events of a long run: the signal before its time limit, and a lost node. After each event the job is
requeued automatically and resumes from its checkpoint. In the end, every step was trained exactly
once, and every trajectory at most once. A separate job then exports the checkpoint.
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import psutil
import pytest

from megatron_async.checkpoint.manifest import list_checkpoints
from megatron_async.commands.launch import Cluster, job_script, launch_run
from megatron_async.config import build_config, load_config
from megatron_async.engines.nodes import node_address
from megatron_async.files.package_files import ROOT
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory, RunOutcome
from megatron_async.store.lineage import Consumption
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics
from tests.launcher.cluster import SlurmCluster, missing_programs
from tests.wanted import needs

MISSING = missing_programs()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.engine,
    pytest.mark.timeout(900),
    needs(not MISSING, f"Slurm ({', '.join(MISSING)})", "MEGATRON_ASYNC_SLURM_TESTS"),
]

ENVIRONMENT = {
    "MEGATRON_ASYNC_ROOT": str(ROOT),
    "MEGATRON_ASYNC_VENV": str(Path(sys.executable).parents[1]),
    # With no requeue permitted, a failed component ends the test immediately.
    "MEGATRON_ASYNC_MAX_REQUEUES": "0",
}
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
STEPS = 10
# Larger than the number of steps at the signal, so that the checkpoint found after the signal was
# caused by the signal.
CHECKPOINT_EVERY = 8
GROUPS, GROUP_SIZE = 4, 4
# Starting Ray, an engine and the trainers, and two steps, take about a minute on two idle cores.
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
engines: {{device: cpu}}
sampling: {{max_new_tokens: 64}}
eval: {{prompts: 4}}
checkpoint: {{every_steps: {CHECKPOINT_EVERY}, export_hf: false}}
store: {{compact_after_checkpoints: 100}}
telemetry: {{progress: lines, trackers: []}}
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path / "cluster") as started:
        yield started


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RunDirectory, Path]:
    """Return a run directory and its job script, as `megatron-async launch --slurm` writes them."""
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


def all_logs(directory: RunDirectory) -> str:
    logs = sorted(directory.logs.glob("*.log"))
    return "\n".join(f"--- {path.name} ---\n{path.read_text()[-1500:]}" for path in logs)


def processes_of(directory: RunDirectory) -> list[psutil.Process]:
    """Return all processes whose command line contains the path of this run directory."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(directory.path) in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return found


class Job:
    """Job of the run on the cluster; its waits fail as soon as the job ends."""

    def __init__(self, cluster: SlurmCluster, directory: RunDirectory, job_file: Path) -> None:
        self._cluster = cluster
        self._directory = directory
        self._start_time = time.monotonic()
        self.id = cluster.submit(job_file, environment=ENVIRONMENT)

    def report(self, event: str) -> None:
        print(f"{time.monotonic() - self._start_time:6.1f} s  {event}")

    def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self._cluster.state(self.id) not in ENDED, all_logs(self._directory)
            assert time.monotonic() < deadline, all_logs(self._directory)
            time.sleep(0.3)

    def wait_for_steps(self, count: int) -> None:
        self.wait_until(lambda: steps_done(self._directory) >= count, START_SECONDS)

    def wait_for_restart(self, number: int) -> None:
        self.wait_until(lambda: self._cluster.restarts(self.id) == number, 120)

    def wait_for_end(self) -> str:
        return self._cluster.wait_for(self.id, ENDED, START_SECONDS)


def test_slurm_run_trains_every_step_once_after_preemption_and_lost_node(
    cluster: SlurmCluster, run: tuple[RunDirectory, Path]
) -> None:
    directory, job_file = run
    job = Job(cluster, directory, job_file)
    assert_ray_requires_its_token(job, directory)
    job.wait_for_steps(2)
    assert_engine_requires_its_key(directory)
    assert_only_ranks_on_the_trainer_node(directory)
    job.report("two steps done; the signal before the time limit")
    cluster.signal_batch(job.id, "USR1")
    job.wait_for_restart(1)
    job.report("queued again")
    saved = list_checkpoints(directory.checkpoints)[0]
    done = steps_done(directory)
    assert saved.step == done, "every trained step must be in the checkpoint"
    assert saved.step < CHECKPOINT_EVERY, "the checkpoint must be the result of the signal"

    job.wait_for_steps(done + 2)
    job.report("resumed, two more steps; the engine's node is lost")
    cluster.set_node("n2", "down")
    job.wait_for_restart(2)
    job.report("queued again")

    assert job.wait_for_end() == "COMPLETED", all_logs(directory)
    job.report("ended")
    assert directory.outcome() is RunOutcome.COMPLETE
    assert_trained_once(directory)
    deadline = time.monotonic() + 30
    while (remaining := processes_of(directory)) and time.monotonic() < deadline:
        time.sleep(0.3)
    assert not remaining

    exported = directory.path.parent / "exported"
    arguments = ("megatron-to-hf", "--src", str(directory.path), "--dst", str(exported))
    script = ROOT / "launch/slurm/convert.sbatch"
    conversion = cluster.submit(script, *arguments, environment=ENVIRONMENT)
    assert cluster.wait_for(conversion, ENDED, 120) == "COMPLETED"
    assert (exported / "model.safetensors").is_file()
    job.report("exported")


def assert_ray_requires_its_token(job: Job, directory: RunDirectory) -> None:
    """Assert that Ray, which listens on the node's address, refuses clients without the session's
    token."""
    session = directory.path / "launch" / f"{job.id}.0"
    job.wait_until((session / "ray.json").exists, START_SECONDS)
    address = json.loads((session / "ray.json").read_text())["address"]

    def ray_status(**variables: str) -> int:
        command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
        environment = {**os.environ, **variables}
        return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode

    assert ray_status(RAY_AUTH_MODE="disabled") != 0
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(session / "ray-token")}
    assert ray_status(**token) == 0


def assert_engine_requires_its_key(directory: RunDirectory) -> None:
    """Assert that the engine listens only on its node's address, and that no command line shows its
    key."""
    key = load_config(directory.config_file).engines.api_key
    lines = [
        " ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])
    ]
    assert not [line for line in lines if key in line]
    model = str(directory.path.parent / "model")
    [server] = [line for line in lines if "engines.sglang.server" in line and model in line]
    host, port = (server.split(option)[1].split()[0] for option in ("--host=", "--port="))
    assert host == node_address()
    statuses = []
    for headers in ({}, {"Authorization": f"Bearer {key}"}):
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("GET", "/get_model_info", headers=headers)
        statuses.append(connection.getresponse().status)
        connection.close()
    assert statuses == [http.client.UNAUTHORIZED, http.client.OK]


def assert_only_ranks_on_the_trainer_node(directory: RunDirectory) -> None:
    """Assert that the manager, the engines and the scorers run only on the other node."""
    nodes: dict[str, list[str]] = {"rollout": [], "trainer": []}
    for process in processes_of(directory):
        command = process.cmdline()
        if "megatron_async.launcher.node" in command:
            role = command[command.index("megatron_async.launcher.node") + 1]
            nodes[role] += [" ".join(child.cmdline()) for child in process.children(recursive=True)]
    actors = ("ray::ManagerHost", "ray::EngineHost", "ray::ScorerWorker")
    for actor in actors:
        assert [line for line in nodes["rollout"] if line.startswith(actor)], actor
        assert not [line for line in nodes["trainer"] if line.startswith(actor)], actor
    ranks = [line for line in nodes["trainer"] if "megatron_async.train_loop.rank" in line]
    assert len([line for line in ranks if "torch.distributed.run" not in line]) == 2


def assert_trained_once(directory: RunDirectory) -> None:
    """Assert that the surviving lineage has every step once, and no trajectory in two batches."""
    with closing(StoreReader(directory.store_file)) as reader:
        content = reader.content()
    consumption = Consumption.at(content.tree, content.tree.newest)
    batches = [b for b in content.batches if consumption.contains(b.lineage, b.step)]
    trained = [trajectory_id for batch in batches for trajectory_id in batch.ids()]
    assert len(trained) == len(set(trained))
    assert len(trained) == STEPS * GROUPS * GROUP_SIZE
    assert sorted(batch.step for batch in batches) == list(range(STEPS))
    lines = [line for line in read_metrics(directory.metrics_file) if "train/loss" in line]
    assert [int(line["step"]) for line in lines] == list(range(STEPS))
    assert int(lines[0]["lineage"]) == 0
    assert int(lines[-1]["lineage"]) == 2


def test_slurm_accepts_the_job_script_when_names_and_options_are_odd(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    """The job script is executed up to the first srun, whose command is a stand-in."""
    name = 'two words 50%j a#b it\'s "so"; b & $HOME'
    build_tiny_model(tmp_path / "model", seed=1)
    settings = tmp_path / "c.yaml"
    settings.write_text(SETTINGS)
    root = tmp_path / f"my {name}"
    overrides = [f"root={root}", f"model.path={tmp_path / 'model'}", f"name={name}"]
    options = (f"--comment={name} \\ it", "--mail-type=NONE")
    nodes = Cluster(0, engine_nodes=1, time_limit="01:00:00", sbatch_options=options)
    script = launch_run(settings, None, overrides, nodes, slurm=True, dry_run=True)
    launch_run(settings, None, overrides, nodes, slurm=False, dry_run=False)
    job_file = tmp_path / "job.sbatch"
    job_file.write_text(script)
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "role: $4, run: $5"\nexit 2\n')
    python.chmod(0o755)
    environment = {**ENVIRONMENT, "MEGATRON_ASYNC_VENV": str(tmp_path / "venv")}
    job = cluster.submit(job_file, environment=environment)
    described = cluster.call(["scontrol", "show", "job", job])
    assert f"JobName={name}\n" in described
    assert f"Comment={name} \\ it" in described
    cluster.wait_for(job, ENDED, 60)
    logs = root / name / "logs"
    assert "session" in (logs / f"job-{job}.log").read_text()
    for role in ("trainer", "rollout"):
        (log,) = logs.glob(f"{role}-*.log")
        assert f"role: {role}, run: {root}/{name}\n" in log.read_text()


# ------------------------------------------------------------ seconds of a stop

SAVE_SECONDS = 6
# Stand-in for both roles. As trainer, its save takes seconds after the signal. As rollout, it ends
# after the save, or with its session.
# Called as `python -P -m MODULE ROLE RUN --index I --count N --session S`.
ROLE = f"""#!/usr/bin/env bash
role=$4 run=$5 session=${{11}}
control="$run/launch/$session"
touch "$control/$role.up"
wait_for_file() {{ until [ -e "$1" ] || [ -e "$2" ]; do sleep 0.1; done; }}
if [ "$role" = rollout ]; then wait_for_file "$run/saved" "$control/closed"; exit 75; fi
wait_for_file "$control/stop" "$control/stop"
end=$((SECONDS + {SAVE_SECONDS}))
while [ $SECONDS -lt $end ]; do
  [ -e "$control/closed" ] && exit 75
  sleep 0.1
done
touch "$run/saved"
exit 75
"""


def submit(cluster: SlurmCluster, folder: Path, stop: int) -> tuple[str, RunDirectory]:
    """Submit a job as `launch` writes it, in which a stop may take `stop` seconds; return the job
    ID and the run directory."""
    directory = RunDirectory(folder / f"run{stop}")
    directory.logs.mkdir(parents=True)
    directory.config_file.write_text("name: x\n")
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(ROLE)
    python.chmod(0o755)
    nodes = Cluster(gpus_per_node=0, engine_nodes=1, time_limit="1:00:00")
    job_file = directory.path / "job.sbatch"
    job_file.write_text(job_script(build_config({}), directory, nodes, 1, stop))
    environment = {
        "MEGATRON_ASYNC_ROOT": str(ROOT),
        "MEGATRON_ASYNC_VENV": str(folder / "venv"),
    }
    return cluster.submit(job_file, environment=environment), directory


def has_both_roles(directory: RunDirectory) -> bool:
    return len(list(directory.path.glob("launch/*/*.up"))) == 2


def is_requeued(cluster: SlurmCluster, job: str) -> bool:
    return cluster.restarts(job) == 1


def test_save_is_cut_off_when_it_exceeds_the_stop_seconds_of_the_job(tmp_path: Path) -> None:
    with SlurmCluster(tmp_path / "cluster", nodes=4) as cluster:
        jobs = [submit(cluster, tmp_path, stop) for stop in (2 * SAVE_SECONDS, 2)]
        for job, directory in jobs:
            cluster.wait_until(partial(has_both_roles, directory), 30)
            cluster.signal_batch(job, "USR1")
        for job, _ in jobs:
            cluster.wait_until(partial(is_requeued, cluster, job), 60)
        saved = [(directory.path / "saved").exists() for _, directory in jobs]
    assert saved == [True, False]
