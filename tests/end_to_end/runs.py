"""Whole runs in processes of their own, and what every run has trained."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from megatron_async.run_directory import RunDirectory
from megatron_async.store.lineage import Consumption
from megatron_async.store.reader import StoreContent
from megatron_async.telemetry.metrics import read_metrics


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


def steps_done(directory: RunDirectory) -> int:
    lines = read_metrics(directory.metrics_file)
    return int(lines[-1]["step"]) + 1 if lines else 0


def assert_trained_once(directory: RunDirectory, content: StoreContent) -> None:
    """Along the surviving lineage each step has one batch, and no trajectory is in two of them."""
    steps = [int(line["step"]) for line in read_metrics(directory.metrics_file)]
    assert steps == list(range(len(steps)))
    consumption = Consumption.at(content.tree, content.tree.newest)
    batches = [b for b in content.batches if consumption.holds(b.lineage, b.step)]
    trained = [trajectory_id for batch in batches for trajectory_id in batch.ids()]
    assert len(trained) == len(set(trained))
    assert sorted({batch.step for batch in batches}) == sorted(batch.step for batch in batches)
