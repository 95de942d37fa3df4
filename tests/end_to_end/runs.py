"""Starts complete runs in separate processes, and checks what they have trained."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_async.run_directory import RunDirectory
from megatron_async.store.lineage import Consumption
from megatron_async.store.reader import StoreContent
from megatron_async.telemetry.metrics import read_metrics


class Command:
    """Python program in a separate process and session, whose output goes to a file."""

    def __init__(
        self, *arguments: str, log: Path, folder: Path | None = None, **environment: str
    ) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], bool], seconds: float, *, running: bool = True) -> None:
        """Wait until `condition` is true; fail the test after `seconds`, or when the process ends
        although `running` is true."""
        deadline = time.monotonic() + seconds
        while not condition():
            ended = running and self.process.poll() is not None
            assert not ended, f"the process ended early:\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, (
                f"the condition is still false after {seconds:g} s:\n{self.text()[-3000:]}"
            )
            time.sleep(0.1)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def kill_everything(self) -> None:
        """Kill the process and all processes that it has started, unless the process has ended."""
        if self.process.poll() is not None:
            return
        for process in (psutil.Process(self.process.pid), *self.family()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(20)


def train(*arguments: str, log: Path) -> Command:
    """Start `megatron-async train` and return its command."""
    return Command("-m", "megatron_async.cli", "train", *arguments, log=log)


def steps_done(directory: RunDirectory) -> int:
    lines = read_metrics(directory.metrics_file)
    return int(lines[-1]["step"]) + 1 if lines else 0


def assert_trained_once(directory: RunDirectory, content: StoreContent) -> None:
    """Assert that each step of the surviving lineage has one batch, and that no trajectory is in
    two batches."""
    steps = [int(line["step"]) for line in read_metrics(directory.metrics_file)]
    assert steps == list(range(len(steps)))
    consumption = Consumption.at(content.tree, content.tree.newest)
    batches = [b for b in content.batches if consumption.contains(b.lineage, b.step)]
    trained = [trajectory_id for batch in batches for trajectory_id in batch.ids()]
    assert len(trained) == len(set(trained))
    assert sorted({batch.step for batch in batches}) == sorted(batch.step for batch in batches)
