"""The benchmark of kills and resumes: what it counts, what it cuts, and its result file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.restart import counters
from benchmarks.restart.__main__ import folder_of_runs, measure, parsed
from benchmarks.restart.report import goals, report
from benchmarks.restart.run import lengths, losses, settings
from megatron_async.config import build_config
from megatron_async.trajectory.batch import TokenBatch

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


def test_lengths_are_those_of_the_seed_and_have_a_long_tail() -> None:
    drawn = lengths(3072, 5500, seed=1)
    assert drawn == lengths(3072, 5500, seed=1) != lengths(3072, 5500, seed=2)
    assert 1100 <= min(drawn) < 0.5 * np.median(drawn)
    assert 1.3 * np.median(drawn) < max(drawn) <= 5500


def test_settings_have_3072_responses_in_a_batch(tmp_path: Path) -> None:
    config = build_config(settings(tmp_path, "kill0", parsed([])))
    assert config.schedule.groups_per_batch * config.schedule.group_size == 3072


def test_trained_batch_has_the_start_of_each_response() -> None:
    def per_token(dtype: str) -> Any:
        return np.arange(9).astype(dtype)

    batch = TokenBatch(
        step=0,
        token_ids_T=per_token("i4"),
        loss_mask_T=per_token("f4"),
        rollout_logprobs_T=per_token("f4"),
        version_T=per_token("i4"),
        lag_T=per_token("i4"),
        cu_seqlens_S1=np.array([0, 5, 9], "i4"),
        rewards_S=np.zeros(2, "f4"),
        group_ids_S=np.zeros(2, "i8"),
        trajectory_ids_S=np.array([0, 1]),
        prompt_lengths_S=np.array([1, 3], "i4"),
        truncated_S=np.zeros(2, bool),
        resumed_S=np.zeros(2, bool),
        columns={"extra": per_token("i2")},
    )
    found = counters.cut(batch, 2)
    assert found.token_ids_T.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert found.columns["extra"].tolist() == found.lag_T.tolist() == [0, 1, 2, 5, 6, 7, 8]
    assert found.cu_seqlens_S1.tolist() == [0, 3, 7]


def row(lost: int, back: float) -> dict[str, Any]:
    times = {"engine_pauses": 0, "blocked": 0, "batch": 2 * back, "trained": 3 * back}
    return {"kind": "kill", "number": 0, "lost_largest": lost, "first_token": back, **times}


def test_every_goal_is_that_of_the_worst_run() -> None:
    good, worse = row(64, 30.0), row(65, 31.0)
    assert "| yes | at most 64 |" in goals([good])
    assert "| yes | at most 30.0 s to the first token |" in goals([good])
    assert "| **no** | at most 65 |" in goals([good, worse])
    assert "| **no** | at most 31.0 s to the first token |" in goals([worse, good])
    assert "| **no** | at most 93.0 s, of which 31.0 s are" in goals([worse, good])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run_is_killed_and_resumed() -> None:
    sizes = ["--groups=4", "--group-size=4", "--longest=500", "--step-seconds=0.02"]
    options = parsed([*sizes, "--moments", "0.5", "0.6"])
    with folder_of_runs() as root:
        found = measure({"kind": "kill", "number": 0}, root, options)
    assert found["tokens"] == sum(lengths(16, 500, 1))
    assert 0 < found["lost_mean"] <= found["lost_largest"] < found["generated"]
    assert 0 < found["first_request"] < found["first_token"] < found["batch"] < found["trained"]
    assert found["engine_pauses"] == 0
    assert "| tokens lost per unfinished response, mean |" in report([found], options)
