"""Tests a run that is started without Slurm by the printed commands: two trainer nodes and one
rollout node.

All nodes are this machine, and simulated engines return invented tokens instead of running a model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from megatron_async.commands.launch import Cluster, launch_run
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory, RunOutcome
from megatron_async.telemetry.metrics import read_metrics

STEPS = 20
RUN_SECONDS = 240
SETTINGS = f"""
name: by_hand
steps: {STEPS}
parallel: {{nodes: 2, ranks: 2, tensor: 2}}
trainer: {{max_restarts: 1}}
engines: {{kind: simulated}}
weights: {{transport: tensor, verify: never}}
schedule: {{preset: copris, groups_per_batch: 2, group_size: 2, concurrency: 8}}
sampling: {{max_new_tokens: 32}}
eval: {{prompts: 2}}
checkpoint: {{every_steps: 100, export_hf: false}}
telemetry: {{progress: lines, trackers: []}}
"""


class NodeProcesses:
    """Processes of one session, one for each command that `launch` prints."""

    def __init__(self, commands: list[str], session: str, log_directory: Path) -> None:
        environment = {
            **os.environ,
            "MEGATRON_ASYNC_VENV": str(Path(sys.executable).parents[1]),
        }
        self._processes = []
        self._logs = []
        for number, command in enumerate(commands):
            log = log_directory / f"{session}.{number}.log"
            with log.open("w") as out:
                self._processes.append(
                    subprocess.Popen(
                        command.replace("SESSION", session).split(),
                        env=environment,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )
            self._logs.append(log)

    def kill_a_rank(self) -> None:
        """Kill one trainer rank of one node by SIGKILL."""
        for process in self._processes:
            for child in psutil.Process(process.pid).children(recursive=True):
                words = child.cmdline()
                if (
                    "megatron_async.train_loop.rank" in words
                    and "torch.distributed.run" not in words
                ):
                    child.kill()
                    return
        raise AssertionError("no trainer rank is running")

    def codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + RUN_SECONDS
        while not condition():
            assert set(self.codes()) == {None}, self.logs()
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)

    def wait_for_end(self) -> list[int | None]:
        deadline = time.monotonic() + RUN_SECONDS
        while None in self.codes():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)
        return self.codes()

    def logs(self) -> str:
        return "\n".join(f"--- {log.name} ---\n{log.read_text()[-1500:]}" for log in self._logs)

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_manual_nodes_restart_killed_rank_stop_by_file_and_resume(tmp_path: Path) -> None:
    """A killed rank restarts the ranks of both nodes; the second session resumes where the first
    has stopped."""
    build_tiny_model(tmp_path / "model", seed=1)
    settings = tmp_path / "c.yaml"
    settings.write_text(SETTINGS)
    overrides = [f"root={tmp_path}", f"model.path={tmp_path / 'model'}"]
    text = launch_run(settings, None, overrides, Cluster(0, None, ""), slurm=False, dry_run=False)
    commands = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(commands) == 3
    directory = RunDirectory(tmp_path / "by_hand")

    def steps_done() -> int:
        lines = read_metrics(directory.metrics_file)
        return int(lines[-1]["step"]) + 1 if lines else 0

    def newest_lineage() -> int:
        return max(
            (int(line["lineage"]) for line in read_metrics(directory.metrics_file)), default=0
        )

    first = NodeProcesses(commands, "first", tmp_path)
    try:
        first.wait_until(lambda: steps_done() >= 2)
        first.kill_a_rank()
        first.wait_until(lambda: newest_lineage() == 1)
        (directory.path / "launch" / "first" / "stop").touch()
        assert first.wait_for_end() == [os.EX_TEMPFAIL] * 3, first.logs()
    finally:
        first.end()
    assert directory.outcome() is RunOutcome.STOPPED
    assert steps_done() < STEPS

    second = NodeProcesses(commands, "second", tmp_path)
    try:
        assert second.wait_for_end() == [0, 0, 0], second.logs()
    finally:
        second.end()
    assert directory.outcome() is RunOutcome.COMPLETE
    lines = [line for line in read_metrics(directory.metrics_file) if "train/loss" in line]
    assert [int(line["step"]) for line in lines] == list(range(STEPS))
    assert {int(line["lineage"]) for line in lines} == {1, 2}
