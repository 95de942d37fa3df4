"""Whatever part of a run on one machine is killed, nothing of the run is left behind.

Simulated engines behind the real processes, so that a start is seconds. What listens meanwhile is
what docs/clusters.md lists; there is no Ray.
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
    print("interrupted", flush=True)
time.sleep(600)  # the kernel of a notebook goes on
"""


class Started(Command):
    """A run that has made its first step, and all its processes at that moment."""

    def __init__(self, folder: Path, command: Sequence[str] = TRAIN, **changes: Any) -> None:
        prepare(folder)
        config = configuration("copris", "simulated", folder, "run", {})
        config |= {"trainer": {"max_restarts": 0}, "parallel": {"ranks": 2}, **changes}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        super().__init__(*command, log=folder / "run.log", folder=folder)
        metrics = RunDirectory(folder / "run").metrics_file
        self.until(lambda: bool(read_metrics(metrics)), 120)
        self.members = self.family()

    def one(self, mark: str) -> psutil.Process:
        return next(p for p in self.members if p.is_running() and mark in " ".join(p.cmdline()))

    def left(self) -> list[psutil.Process]:
        return [p for p in self.members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Started]:
    started = Started(tmp_path, getattr(request, "param", TRAIN))
    yield started
    started.process.kill()
    started.process.wait(20)
    for process in started.left():
        process.kill()


@pytest.mark.parametrize("mark", ["", "torch.distributed.run"], ids=["train", "torchrun"])
def test_the_end_of_one_is_the_end_of_all(run: Started, mark: str) -> None:
    """Within seconds: nobody waits for a limit of time."""
    victim = run.one(mark) if mark else psutil.Process(run.process.pid)
    victim.send_signal(signal.SIGKILL)
    run.until(lambda: not run.left(), 45, running=False)
    code = run.process.wait(20)
    if mark:
        last = run.log.read_text().strip().splitlines()[-1]
        assert code == 1 and last.startswith("error: the trainer was killed by SIGKILL"), last


def test_interrupted_run_leaves_no_process_and_no_foreign_weights(
    tmp_path: Path,
) -> None:
    """In a directory that runs share, whatever processes before it have left in the run's part."""
    shared = tmp_path / "shared"
    weights = {"transport": "disk", "directory": str(shared), "verify": "never"}
    run = Started(tmp_path, weights=weights)
    try:
        [mine] = shared.iterdir()
        assert mine.name.startswith("run-")
        left = [mine / "0.77", mine / ".0.78.partial", shared / "another-run" / "0.0"]
        for directory in left:
            directory.mkdir(parents=True)
        run.until(lambda: [path.exists() for path in left] == [False, False, True], 30)
        run.process.send_signal(signal.SIGINT)
        assert run.process.wait(60) == 130
        assert run.left() == []
        assert 1 <= sum(path.name[:1] != "." for path in mine.iterdir()) <= 3
    finally:
        run.process.kill()
        for process in run.left():
            process.kill()


@pytest.mark.parametrize("run", [("-c", NOTEBOOK)], indirect=True, ids=["notebook"])
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_a_notebook_that_is_interrupted_or_restarted_leaves_none(
    run: Started, sign: signal.Signals
) -> None:
    run.process.send_signal(sign)
    if sign == signal.SIGINT:
        run.until(lambda: "interrupted" in run.log.read_text(), 60)
        assert run.left() == [] and run.process.poll() is None
    run.until(lambda: not run.left(), 45, running=False)


def test_a_run_listens_where_the_page_lists_it_and_has_no_ray(tmp_path: Path) -> None:
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
