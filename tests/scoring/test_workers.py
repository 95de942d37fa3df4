"""Tests scorer workers: scores, time limits, replacement of failed processes, complete cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_async.config.reward import RewardConfig, ScorerSettings
from megatron_async.config.rollout import TaskConfig
from megatron_async.errors import UserError
from megatron_async.models.tiny_model import character_tokenizer, write_character_tokenizer
from megatron_async.process_backends.local import local_backend
from megatron_async.scoring.interface import ResponseScore
from megatron_async.scoring.jobs import ScoreJob
from megatron_async.scoring.pool import RemoteScorerPool
from megatron_async.scoring.workers import ScorerWorker
from megatron_async.tasks.procedural import ProceduralProblems
from megatron_async.trajectory.types import Prompt
from tests.scoring.driven import DrivenWorker

HANGS_MATH_VERIFY = "10^{10^{10^{10}}}"


def _score(worker: DrivenWorker, payload: dict[str, str], text: str) -> ResponseScore:
    """Return the worker's score of one response to the prompt with this payload."""
    ((score,),) = worker.score([ScoreJob(0, payload, (text,))])
    return score


def _is_dead(pid: int) -> bool:
    """Return whether no process has this ID."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def math_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    path.write_text(json.dumps({"prompt": "1/2?", "answer": "1/2"}) + "\n")
    return str(path)


@pytest.fixture
def worker(math_file: str) -> Iterator[DrivenWorker]:
    config = TaskConfig(kind="files", name="math", path=math_file, scorer_timeout_seconds=20.0)
    worker = DrivenWorker(ScorerSettings(task=config))
    yield worker
    worker.close()


def _with_limit(math_file: str, policy: str) -> DrivenWorker:
    """Return a worker with a limit of 1 s and this policy for timeouts."""
    task = TaskConfig.model_validate(
        {
            "kind": "files",
            "name": "math",
            "path": math_file,
            "scorer_timeout_seconds": 1.0,
            "on_scorer_timeout": policy,
        }
    )
    return DrivenWorker(ScorerSettings(task=task))


def test_worker_starts_second_process_when_first_start_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.scoring.process.START_TIMEOUT_SECONDS", 12.0)
    began = tmp_path / "began"
    code = (
        "import pathlib, time\n"
        f"began = pathlib.Path({str(began)!r})\n"
        "if not began.exists():\n    began.touch()\n    time.sleep(600)\n"
        "def score(sample):\n    return 1.0\n"
    )
    (tmp_path / "mine.py").write_text(code)
    rewards = [RewardConfig(name=f"{tmp_path / 'mine.py'}:score")]
    worker = DrivenWorker(ScorerSettings(rewards=rewards))
    try:
        assert _score(worker, {}, "x").reward == 1.0
        assert worker.restarts == 1
    finally:
        worker.close()


def test_worker_replaces_process_when_score_hangs(math_file: str) -> None:
    worker = _with_limit(math_file, "zero")
    worker.start()
    first = worker.pid()
    assert first is not None
    began = time.monotonic()
    score = _score(worker, {"answer": "3"}, rf"\boxed{{{HANGS_MATH_VERIFY}}}")
    assert time.monotonic() - began < 4.0
    assert score.reward == 0.0
    assert score.detail["scorer_timeout"] == 1.0
    assert _is_dead(first)
    assert worker.restarts == 1
    worker.start()
    assert worker.pid() != first
    worker.close()


def test_worker_starts_no_process_when_closed_during_score(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\ndef score(sample):\n    time.sleep(30)\n")
    part = RewardConfig(name=f"{tmp_path / 'slow.py'}:score")

    async def closed_meanwhile() -> ResponseScore:
        """Close a worker while it scores; return the score."""
        worker = ScorerWorker(ScorerSettings(task=TaskConfig(), rewards=[part]))
        await worker.start()
        scoring = asyncio.create_task(worker.score([ScoreJob(0, {"metadata": {}}, ("1",))]))
        await asyncio.sleep(0.2)
        worker.close()
        ((score,),) = await asyncio.wait_for(scoring, 10)
        return score

    before = set(psutil.Process().children(recursive=True))
    assert asyncio.run(closed_meanwhile()).detail["scorer_crash"] == 1.0
    assert set(psutil.Process().children(recursive=True)) <= before


def test_worker_scores_and_counts_restart_when_idle_scorer_was_killed(worker: DrivenWorker) -> None:
    assert _score(worker, {"answer": "1/2"}, "0.5").reward == 1.0
    pid = worker.pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # A stopped scorer cannot reply before it dies.
    os.kill(pid, signal.SIGKILL)
    score = _score(worker, {"answer": "1/2"}, "0.5")
    assert score.reward == 1.0
    assert worker.restarts == 1


def test_worker_repeats_score_when_scorer_is_killed_during_score(worker: DrivenWorker) -> None:
    worker.start()
    pid = worker.pid()
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)  # The kill must come after the request and before a reply.
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    score = _score(worker, {"answer": "1/2"}, "0.5")
    killer.join()
    assert score.reward == 1.0 and "scorer_crash" not in score.detail
    assert worker.restarts == 1


def test_worker_starts_second_process_when_first_is_killed_before_ready(
    worker: DrivenWorker,
) -> None:
    killed: list[int] = []

    def kill_the_first() -> None:
        """Kill the first scorer process that this process starts, as soon as it exists."""
        deadline = time.monotonic() + 10
        while not killed and time.monotonic() < deadline:
            for child in psutil.Process().children():
                if "megatron_async.scoring.process_main" in " ".join(child.cmdline()):
                    child.kill()
                    killed.append(child.pid)
            time.sleep(0.001)

    killer = threading.Thread(target=kill_the_first)
    killer.start()
    worker.start()
    killer.join()
    assert killed and worker.pid() not in killed
    assert worker.restarts == 1
    assert _score(worker, {"answer": "1/2"}, "0.5").reward == 1.0


def test_worker_raises_user_error_when_settings_are_bad() -> None:
    with pytest.raises(UserError, match="mixture"):
        DrivenWorker(ScorerSettings(task=TaskConfig(params={"mixture": []}))).start()


def test_remote_pool_scores_and_leaves_no_process_when_worker_is_killed(tmp_path: Path) -> None:
    """The process of a worker is killed during the scores."""
    write_character_tokenizer(tmp_path)
    config = TaskConfig(answer_marker="#", scorer_workers=2)
    tokenizer = character_tokenizer()
    pairs = ProceduralProblems(config).worked(10)
    with local_backend(tmp_path) as backend:
        pool = RemoteScorerPool(ScorerSettings(task=config), str(tmp_path), backend)

        def pids() -> list[int]:
            found = []
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # A killed process may be a zombie.
                    if any("process_main" in word for word in process.cmdline()):
                        found.append(process.pid)
            return found

        async def score_all() -> tuple[list[tuple[float | None, dict[str, float]]], list[int]]:
            prompts = [Prompt(np.zeros(1, np.int32), "chain_sum", p.payload) for p, _ in pairs]
            await pool.workers[0].start()
            scores = [
                asyncio.create_task(
                    pool.score(prompt, tokenizer.encode(text if number % 2 else text + "7"))
                )
                for number, (prompt, (_, text)) in enumerate(zip(prompts, pairs, strict=True))
            ]
            await asyncio.sleep(0)
            worker, *_ = psutil.Process().children()
            worker.kill()
            return await asyncio.gather(*scores), pids()

        scores, found = asyncio.run(score_all())
        pool.close()
        assert [reward for reward, _ in scores] == [0.0, 1.0] * 5
        deadline = time.monotonic() + 10
        while not all(map(_is_dead, found)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert all(map(_is_dead, found))
