"""Tests scorers that fork, flood, print, hang and leave processes: rewards stay correct.

Each behavior is a function in `hostile/sitecustomize.py` that runs after every score.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megatron_async.config.reward import ScorerSettings
from megatron_async.config.rollout import TaskConfig
from megatron_async.process_backends.local import local_backend
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.jobs import ScoreJob
from megatron_async.scoring.pool import scorer_pool
from tests.scoring.driven import DrivenWorker

HOSTILE = Path(__file__).parent / "hostile"
MARK = "megatron_async.scoring.process_main"
ENDS_SECONDS = 60.0  # Time for the kernel to end processes on a machine with a load of 40.


@pytest.fixture
def config(tmp_path: Path) -> TaskConfig:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    return TaskConfig(kind="files", name="exact", path=str(path), answer_marker="#")


@pytest.fixture
def hostile(
    config: TaskConfig, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., DrivenWorker]]:
    """Function that starts a worker whose scorer has the named behavior."""
    workers = []

    def start(behavior: str, limit_seconds: float = 60.0) -> DrivenWorker:
        monkeypatch.setenv("HOSTILE_SCORER", behavior)
        monkeypatch.setenv("PYTHONPATH", f"{HOSTILE}:{os.environ.get('PYTHONPATH', '')}")
        limited = config.model_copy(update={"scorer_timeout_seconds": limit_seconds})
        workers.append(DrivenWorker(ScorerSettings(task=limited)))
        return workers[-1]

    yield start
    for worker in workers:
        worker.close()


def _score(worker: DrivenWorker, right: bool) -> ResponseScore:
    """Return the worker's score of a right or wrong response."""
    ((score,),) = worker.score([ScoreJob(0, {"answer": "2"}, ("#2" if right else "#3",))])
    return score


def _remaining(config: TaskConfig) -> list[psutil.Process]:
    """Return the living processes of this test: scorers, keepers, and what the scorers started."""
    found = []
    for process in psutil.process_iter():
        try:
            line = process.cmdline()
        except psutil.Error:
            continue
        if MARK in line and any(config.path in argument for argument in line):
            found.append(process)
    return found


def _wait_for(count: int, config: TaskConfig) -> None:
    """Wait until `count` processes of this test's scorers remain."""
    deadline = time.monotonic() + ENDS_SECONDS
    while len(remaining := _remaining(config)) != count and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(remaining) == count, remaining


@pytest.mark.parametrize(
    ("behavior", "stray"),
    [
        ("fork_and_return", 0),
        ("fork_and_raise", 0),
        ("garbage", 0),
        ("printed", 0),
        ("read_input", 0),
        ("leave_children", 0),
        ("garbage_in_the_channel", 5),
        ("fork_and_forge", 1),
    ],
)
def test_worker_returns_each_responses_own_reward_when_scorer_misbehaves(
    hostile: Callable[..., DrivenWorker], config: TaskConfig, behavior: str, stray: int
) -> None:
    worker = hostile(behavior)
    scores = [_score(worker, right) for right in (True, False, True, False, False, True)]
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert [score.detail.get("stray_output", 0.0) for score in scores] == [stray] * 6
    assert worker.restarts == 0
    worker.close()
    assert _remaining(config) == []


def test_worker_assigns_replies_correctly_when_one_reply_is_interrupted(
    hostile: Callable[..., DrivenWorker],
) -> None:
    worker = hostile("interrupted_reply")
    right = [True, False, True, True, False]
    scores = worker.score([ScoreJob(0, {"answer": "2"}, ("#2" if r else "#3",)) for r in right])
    assert [score.reward for (score,) in scores] == [1.0, 0.0, 1.0, 1.0, 0.0]


def test_worker_receives_replies_within_limit_when_stray_packets_flood(
    hostile: Callable[..., DrivenWorker], config: TaskConfig
) -> None:
    worker = hostile("flood_from_a_thread")
    scores = [_score(worker, right) for right in (True, False, True)]
    assert [score.reward for score in scores] == [1.0, 0.0, 1.0]
    assert sum(score.detail.get("stray_output", 0.0) for score in scores) > 0

    worker = hostile("flood", limit_seconds=1.0)
    worker.start()
    began = time.monotonic()
    score = _score(worker, True)
    assert score.detail["scorer_timeout"] == 1.0 and score.detail["stray_output"] > 0
    assert time.monotonic() - began < 1.0 + ENDS_SECONDS


@pytest.mark.parametrize("behavior", ["stop_the_parent", "stop_the_parent_for_ever"])
def test_worker_recovers_within_seconds_when_scorer_stops_its_keeper(
    hostile: Callable[..., DrivenWorker], config: TaskConfig, behavior: str
) -> None:
    worker = hostile(behavior, limit_seconds=1.0)
    worker.start()
    began = time.monotonic()
    assert _score(worker, True).detail["scorer_timeout"] == 1.0
    assert time.monotonic() - began < 30
    assert _remaining(config) == []


def test_pool_recovers_within_seconds_when_scorers_stop_their_keepers(
    hostile: Callable[..., DrivenWorker], config: TaskConfig, tmp_path: Path
) -> None:
    hostile("stop_the_parent_for_ever")  # The call sets the environment variables.
    limited = config.model_copy(update={"scorer_timeout_seconds": 1.0, "scorer_workers": 2})
    with local_backend(tmp_path) as backend:
        pool = scorer_pool(ScorerSettings(task=limited), "", backend)
        began = time.monotonic()
        try:
            scores = asyncio.run(pool.score_texts({"answer": "2"}, ["#2", "#3"]))
        finally:
            pool.close()
        assert [score.detail["scorer_timeout"] for score in scores] == [1.0] * 2
        assert time.monotonic() - began < ENDS_SECONDS, "ending a stopped keeper once took 75 s"
    assert _remaining(config) == []


@pytest.mark.parametrize(
    "behavior",
    [
        "nan",
        "infinite",
        "nan_part",
        "beyond_float32",
        "huge_number",
        "huge_reply",
        "text_for_a_reward",
        "nothing",
        "exit_at_once",
        "endless_recursion",
    ],
)
def test_worker_counts_scorer_error_when_reward_is_not_finite_number(
    hostile: Callable[..., DrivenWorker], behavior: str
) -> None:
    worker = hostile(behavior)
    for _ in range(2):
        score = _score(worker, True)
        assert score.reward == 0.0
        assert score.detail["scorer_error"] == 1.0
    assert worker.restarts == 0


def test_log_holds_start_of_output_when_scorer_prints_too_much(
    hostile: Callable[..., DrivenWorker], capfd: pytest.CaptureFixture[str]
) -> None:
    worker = hostile("printed")
    assert _score(worker, True).reward == 1.0
    worker.close()
    printed = capfd.readouterr().err
    assert printed.startswith("xxx") and "printed more than 16 KiB" in printed
    assert len(printed) < 20_000


@pytest.mark.parametrize(
    ("behavior", "kind"),
    [
        ("leave_children_and_hang", "scorer_timeout"),
        ("leave_children_and_die", "scorer_crash"),
    ],
)
def test_worker_kills_processes_of_scorer_when_score_fails(
    hostile: Callable[..., DrivenWorker], config: TaskConfig, behavior: str, kind: str
) -> None:
    worker = hostile(behavior, limit_seconds=2.0)
    assert _score(worker, True).detail[kind] == 1.0
    assert _remaining(config) == []


def test_keeper_kills_all_processes_when_worker_is_killed(
    hostile: Callable[..., DrivenWorker], config: TaskConfig
) -> None:
    hostile("leave_children")  # The call sets the environment variables.
    code = (
        "import sys, time\n"
        "from megatron_async.config.reward import ScorerSettings\n"
        "from megatron_async.scoring.jobs import ScoreJob\n"
        "from tests.scoring.driven import DrivenWorker\n"
        "worker = DrivenWorker(ScorerSettings.model_validate_json(sys.argv[1]))\n"
        "print(worker.score([ScoreJob(0, {'answer': '2'}, ('#2',))])[0][0].reward, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, ScorerSettings(task=config).model_dump_json()],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        try:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "1.0\n"
            assert len(_remaining(config)) == 4  # These are keeper, scorer, child and grandchild.
        finally:
            parent.kill()
    _wait_for(0, config)


def test_worker_replaces_keeper_and_scorer_when_keeper_is_killed(
    hostile: Callable[..., DrivenWorker], config: TaskConfig
) -> None:
    worker = hostile("garbage")
    assert _score(worker, True).reward == 1.0
    scorer = psutil.Process(worker.pid())
    keeper = scorer.parent()
    assert keeper is not None and keeper.cmdline() == scorer.cmdline()
    os.kill(keeper.pid, signal.SIGKILL)
    while keeper.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.02)
    assert _score(worker, False).reward == 0.0 and _score(worker, True).reward == 1.0
    assert worker.restarts == 1
    _wait_for(2, config)
