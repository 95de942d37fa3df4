"""The benchmark of kills and resumes: what it counts, what it cuts, and its result file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.restart import counters
from benchmarks.restart.__main__ import goals
from benchmarks.restart.run import losses

_WRITES = """
import os, signal, sys
from pathlib import Path
from benchmarks.restart.counters import Counters

one = Counters(Path(sys.argv[1]))
one.trajectories[[0, 7]] = [3, 5]
one.waited(0.25)
one.waited(0.5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_counters_survive_a_sigkill(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _WRITES, str(tmp_path / "lives" / "engine-1")]
    assert subprocess.run(command, check=False).returncode == -9
    [found] = counters.read_counters(tmp_path / "lives", "engine")
    assert found.trajectories[[0, 6, 7]].tolist() == [3, 0, 5]
    assert (found["events"], found["seconds"], found["longest"]) == (2, 0.75, 0.5)
    assert found["first"] == 0


@pytest.mark.parametrize(
    ("name", "trajectory"),
    [("t17-3;", 17), ("5f0c.12;t17-3;", 17), ("eval.t17.0;", None), ("5f0c.12;check;", None)],
)
def test_trajectory_of_a_request_is_in_its_name(name: str, trajectory: int | None) -> None:
    assert counters.trajectory_of(name) == trajectory


def test_losses_are_of_unfinished_responses_only() -> None:
    """Prompts of 5: lost 3 of 20; finished; lost all 7 of 7; never started; none yet generated."""
    generated = np.array([25.0, 40, 12, 0, 0])
    started = np.array([5.0, 5, 5, 0, 5])
    resumed = np.array([22.0, 0, 5, 5, 5])
    assert losses(generated, started, resumed).tolist() == [3, 7, 0]
    with pytest.raises(ValueError, match="1 responses have tokens that were not generated"):
        losses(generated - 5, started, resumed)


def row(lost: int, back: float) -> dict[str, Any]:
    times = {"engine_pauses": 0, "blocked": 0, "batch": 2 * back, "trained": 3 * back}
    return {"kind": "kill", "number": 0, "lost_largest": lost, "first_token": back, **times}


def test_every_goal_is_that_of_the_worst_run() -> None:
    good, worse = row(64, 30.0), row(65, 31.0)
    assert "| 64 | 64.0 | yes |" in goals([good])
    assert "first token | 30 | 30.0 | yes |" in goals([good])
    assert "| 64 | 65.0 | **no** |" in goals([good, worse])
    assert "first token | 30 | 31.0 | **no** |" in goals([worse, good])
    assert "is trained | 30 | 93.0 | **no** |" in goals([worse, good])
