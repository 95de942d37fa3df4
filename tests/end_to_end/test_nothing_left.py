"""Tests that no process of a run on one machine remains, whichever process of the run is killed.

Simulated engines run in the usual processes, so that a run starts within seconds. Meanwhile the
processes of the run listen only on the addresses that docs/clusters.md lists, and Ray does not run.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import read_metrics
from tests.crash.run import configuration, prepare
from tests.end_to_end.runs import Command
from tests.listening import documented, kind_of, listening

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TRAIN = ("-m", "megatron_async.cli", "train", "--config", "run.yaml")
NOTEBOOK = """
import time
from megatron_async import train
try:
    train("run.yaml")
except KeyboardInterrupt:
    print("KeyboardInterrupt reached the cell", flush=True)
time.sleep(600)  # The kernel of a notebook keeps running.
"""


class Started(Command):
    """Run that has made its first step, with all processes that it had at that moment."""

    def __init__(self, folder: Path, command: Sequence[str] = TRAIN, **changes: Any) -> None:
        prepare(folder)
        config = configuration("copris", "simulated", folder, "run", {})
        config |= {"trainer": {"max_restarts": 0}, "parallel": {"ranks": 2}, **changes}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        super().__init__(*command, log=folder / "run.log", folder=folder)
        metrics = RunDirectory(folder / "run").metrics_file
        self.until(lambda: bool(read_metrics(metrics)), 120)
        self.members = self.family()

    def member(self, mark: str) -> psutil.Process:
        return next(p for p in self.members if p.is_running() and mark in " ".join(p.cmdline()))

    def remaining(self) -> list[psutil.Process]:
        return [p for p in self.members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    started = Started(tmp_path, getattr(request, "param", TRAIN))
    yield started
    started.process.kill()
    started.process.wait(20)
    for process in started.remaining():
        process.kill()


@pytest.mark.parametrize("mark", ["", "torch.distributed.run"], ids=["train", "torchrun"])
def test_all_processes_end_when_train_or_torchrun_is_killed(run: Started, mark: str) -> None:
    """They end within seconds, because no process waits for a time limit."""
    victim = run.member(mark) if mark else psutil.Process(run.process.pid)
    victim.send_signal(signal.SIGKILL)
    run.until(lambda: not run.remaining(), 45, running=False)
    code = run.process.wait(20)
    if mark:
        last = run.log.read_text().strip().splitlines()[-1]
        assert code == 1 and last.startswith("error: the trainer was killed by SIGKILL"), last


def test_interrupted_run_leaves_no_process_and_no_foreign_weights(
    tmp_path: Path,
) -> None:
    """Runs share the weights directory, and earlier processes may have left files in the folder of
    this run."""
    shared = tmp_path / "shared"
    weights = {"transport": "disk", "directory": str(shared), "verify": "never"}
    run = Started(tmp_path, weights=weights)
    try:
        [own_folder] = shared.iterdir()
        assert own_folder.name.startswith("run-")
        leftovers = [
            own_folder / "0.77",
            own_folder / ".0.78.partial",
            shared / "another-run" / "0.0",
        ]
        for directory in leftovers:
            directory.mkdir(parents=True)
        run.until(lambda: [path.exists() for path in leftovers] == [False, False, True], 30)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130
        assert run.remaining() == []
        assert 1 <= sum(path.name[:1] != "." for path in own_folder.iterdir()) <= 3
    finally:
        run.process.kill()
        for process in run.remaining():
            process.kill()


@pytest.mark.parametrize("run", [("-c", NOTEBOOK)], indirect=True, ids=["notebook"])
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_or_restarted_notebook_leaves_no_process(
    run: Started, sign: signal.Signals
) -> None:
    run.process.send_signal(sign)
    if sign == signal.SIGINT:
        run.until(lambda: "reached the cell" in run.log.read_text(), 60)
        assert run.remaining() == [] and run.process.poll() is None
    run.until(lambda: not run.remaining(), 45, running=False)


def test_run_listens_only_where_documented_and_starts_no_ray(tmp_path: Path) -> None:
    run = Started(tmp_path)
    try:
        processes = [psutil.Process(run.process.pid), *run.members]
        found, kinds = listening(processes), {kind_of(process) for process in processes}
    finally:
        run.process.terminate()
        run.process.wait(60)
    assert found == documented()
    assert {where for _, where in found} == {"loopback"}
    assert kinds >= {"`train`", "rollout manager", "host of an engine", "engine", "trainer rank"}
    assert "Ray" not in kinds
