"""Tests what a store keeps when its writer process is killed with SIGKILL again and again.

After each kill, no finished trajectory is lost, and a running trajectory has lost less than a chunk
and its newest append. At the end, along the surviving lineage, each trajectory is in at most one
batch, and all others are still in the store.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.types import TrajectoryState
from tests.store.writer_process import CHUNK, Manager, length_of, newest_manifest
from tests.trajectory.builders import STORE, expected, response

MAX_AT_ONCE = 16  # Largest number of tokens of one append.


@dataclass
class Printed:
    """What one writer process has printed: what was appended, finished and batched, by id."""

    start: int = -1
    appended: dict[int, int] = field(default_factory=dict)
    finished: set[int] = field(default_factory=set)
    batches: dict[int, list[int]] = field(default_factory=dict)

    def parse(self, line: str) -> None:
        word, *rest = line.split()
        numbers = [int(n) for n in rest]
        match word:
            case "open":
                self.start = numbers[1]
            case "appended":
                self.appended[numbers[0]] = numbers[1]
            case "finished":
                self.finished.add(numbers[0])
            case "batched":
                self.batches[numbers[0]] = numbers[1:]


def run_until_killed(run: Path, lineage: int, directory: str, seconds: float) -> Printed:
    """Start a writer process, kill it `seconds` after its first output; return its output."""
    printed = Printed()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.store.writer_process", str(run)]
    log = run / f"life-{lineage}.log"
    with log.open("wb") as out, (run / "errors.log").open("ab") as errors:
        child = subprocess.Popen(
            [*command, str(lineage), str(lineage), directory],
            stdout=out,
            stderr=errors,
            env=environment,
        )
        try:
            deadline = time.monotonic() + 60
            while log.stat().st_size == 0:
                assert child.poll() is None, (run / "errors.log").read_text()
                assert time.monotonic() < deadline, "the writer did not start within 60 s"
                time.sleep(0.01)
            time.sleep(seconds)
            assert child.poll() is None, (run / "errors.log").read_text()
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait(30)
    text = log.read_text()
    for line in text[: text.rfind("\n") + 1].splitlines():
        printed.parse(line)
    return printed


def exported_groups(run: Path) -> set[int]:
    file = run / "export" / "trajectories.jsonl"
    if not file.exists():
        return set()
    text = file.read_text()
    complete = text[: text.rfind("\n") + 1].splitlines()
    return {json.loads(line)["group_id"] for line in complete}


@pytest.mark.slow
@pytest.mark.one_core
@pytest.mark.parametrize("where", ["in the run directory", "on a disk of the node"])
def test_kills_lose_no_finished_trajectory_and_at_most_one_chunk(
    tmp_path: Path, where: str
) -> None:
    rng, kills = random.Random(5), 6
    directory = str(tmp_path / "scratch") if where != "in the run directory" else ""
    processes: list[Printed] = []
    for lineage in range(kills):
        printed = run_until_killed(tmp_path, lineage, directory, rng.uniform(0.3, 1.2))
        processes.append(printed)
        reader = StoreReader(tmp_path / STORE)
        kept = {s.trajectory_id: s for s in reader.summaries()}
        for trajectory_id, count in printed.appended.items():
            if trajectory_id not in kept:
                continue  # It is consumed and exported, which is checked below.
            found = reader.trajectory(trajectory_id)
            got = response(found)
            assert got == expected(trajectory_id, len(got))
            assert len(got) > count - CHUNK - MAX_AT_ONCE
            if trajectory_id in printed.finished:
                assert len(got) == length_of(trajectory_id)
                done = (TrajectoryState.FINISHED, TrajectoryState.SCORED, TrajectoryState.BATCHED)
                assert found.state in done
        reader.close()

    final = newest_manifest(tmp_path)
    trained: list[int] = []
    for printed, following in zip(processes, [*processes[1:], None], strict=True):
        end = final["step"] if following is None else following.start
        assert printed.start >= 0
        trained += [g for step, ids in printed.batches.items() if step < end for g in ids]
    assert len(trained) == len(set(trained)), "a group was trained twice"
    assert len(trained) >= 2 * kills, "too few groups were trained for a meaningful test"

    async def last_process() -> None:
        manager = Manager(tmp_path, kills, kills, directory)
        state = manager.store._state
        assert manager.store.recovery is None
        unconsumed = {g.group_id for g in manager.store.unconsumed_groups()}
        assert unconsumed.isdisjoint(trained)
        assert unconsumed | set(trained) == set(range(state.counters.next_group))
        assert exported_groups(tmp_path) <= set(trained)
        await manager.store.close()

    asyncio.run(last_process())
