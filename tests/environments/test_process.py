"""Tests environments in a real worker process, whose code blocks, kills or fills the process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from megatron_async.config import build_config
from megatron_async.config.load import merge
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.workers import EnvironmentWorkers, EpisodeSessions
from megatron_async.models.tiny_model import write_character_tokenizer
from megatron_async.process_backends.local import LocalBackend, local_backend
from megatron_async.trajectory.types import Turn

VILLAIN = str(Path(__file__).with_name("villain.py"))
THREADS = 8
SECONDS = 300.0


class Workers:
    """One worker process that runs `Villain` environments."""

    def __init__(self, folder: Path, backend: LocalBackend) -> None:
        self.folder, self.backend = folder, backend
        settings: Mapping[str, Any] = {
            "model": {"path": str(folder)},
            "task": {"kind": "seeds"},
            "environment": {
                "name": f"{VILLAIN}:Villain",
                "arguments": {"marker": str(folder)},
            },
            "episode": {"step_seconds": 1.0, "threads": THREADS, "memory_mib": 1024},
        }
        self.workers = EnvironmentWorkers(build_config(merge({}, settings)), backend)

    def process(self) -> psutil.Process:
        """Return the worker process; wait while it is being started."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for process in psutil.Process().children():
                if "environments0" in " ".join(process.cmdline()):
                    return process
            time.sleep(0.05)
        raise TimeoutError("the worker process did not start")


@pytest.fixture(scope="module")
def villains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    folder = tmp_path_factory.mktemp("villains")
    write_character_tokenizer(folder)
    with local_backend(folder) as backend:
        yield Workers(folder, backend)


def payload(how: str) -> dict[str, Any]:
    return {"metadata": {"seed": 7, "how": how}}


class Player:
    """Client of a worker that plays episodes as a run does, with made-up responses."""

    def __init__(self, villains: Workers) -> None:
        self.sessions = EpisodeSessions(villains.workers)

    async def play(self, number: int, how: str, kill: int | None = None) -> list[Turn]:
        """Play an episode to its end, and return its turns.

        `how` tells the environment what to do. `kill` is the ID of a process that is killed after
        the first turn.
        """
        try:
            opened = await self.sessions.begin(number, payload(how))
            turns = [Turn(0, None, 0, opened.messages, state=opened.state)]
            while True:
                stepped = await self.sessions.step(
                    number, payload(how), turns, [65, 66], input_budget=1 << 30, last=False
                )
                turns[-1] = replace(
                    turns[-1], reward=stepped.reward, answer=stepped.answer, state=None
                )
                if stepped.ended is not None:
                    self.fault = stepped.fault
                    return turns
                if kill is not None and len(turns) == 1:
                    os.kill(kill, signal.SIGKILL)
                following = Turn(len(turns), len(turns) - 1, 0, stepped.messages)
                turns.append(replace(following, state=stepped.state))
        finally:
            await self.sessions.forget(number)


ENDS_AS_FAULT = {
    "raise": r"Villain.step raised ValueError: no such move at .*villain.py:\d+",
    "sys_exit": r"Villain.step raised SystemExit: enough",
    "memory": r"Villain.step raised MemoryError",
    "hang": r"Villain.step took longer than 1 s \(episode.step_seconds\) and is still running",
    "hang_async": r"Villain.step took longer than 1 s \(episode.step_seconds\)$",
    "deaf_async": r"Villain.step took longer than 1 s .* and is still running",
}


@pytest.mark.parametrize("how", ENDS_AS_FAULT)
async def test_environment_fault_is_one_message_and_other_episodes_continue(
    villains: Workers, how: str
) -> None:
    """An episode that is played afterward succeeds in the same process."""
    player, worker = Player(villains), villains.process().pid
    with pytest.raises(EnvironmentFault, match=ENDS_AS_FAULT[how]):
        await player.play(0, how)
    assert len(await player.play(1, "well")) == 3
    assert villains.process().pid == worker
    assert player.sessions.counts.total() == 0


@pytest.mark.parametrize("how", ["stdout", "fork", "own_text"])
async def test_worker_survives_when_an_environment_uses_its_process_oddly(
    villains: Workers, how: str
) -> None:
    player, worker = Player(villains), villains.process().pid
    turns = await player.play(0, how)
    assert [turn.reward for turn in turns] == ([1.0] * 3 if how != "own_text" else [1, 0, 1])
    assert all(type(m["content"]) is str for turn in turns for m in turn.messages)
    assert villains.process().pid == worker


async def test_episode_keeps_its_rewards_when_close_raises(villains: Workers) -> None:
    player = Player(villains)
    assert len(await player.play(0, "close")) == 3
    assert player.fault is not None
    assert "Villain.close raised OSError: it is locked" in player.fault


@pytest.mark.parametrize("how", ["exit_once", "block", "greedy"])
async def test_all_episodes_are_restored_when_their_worker_dies(
    villains: Workers, how: str
) -> None:
    """The worker exits, its event loop is blocked, or one thread keeps the interpreter's lock."""
    player = Player(villains)
    found = await asyncio.gather(*(player.play(i, how if i == 3 else "well") for i in range(6)))
    assert [len(turns) for turns in found] == [3] * 6
    assert player.sessions.counts["workers_lost"] > 0
    assert player.sessions.counts["restored"] > 0
    assert player.sessions.counts["replay_mismatches"] == 0
    if how != "exit_once":
        log = (villains.folder / "environments0.log").read_text()
        assert "Timeout (0:00:05)!" in log
        assert "villain.py" in log.rpartition("Timeout")[2], "the log has the blocked code's file"


async def test_only_the_episode_that_always_kills_its_worker_fails(villains: Workers) -> None:
    player = Player(villains)
    names = ["well", "exit", "well"]
    found = await asyncio.gather(
        *(player.play(i, how) for i, how in enumerate(names)), return_exceptions=True
    )
    for how, outcome in zip(names, found, strict=True):
        if how == "well":
            assert isinstance(outcome, list), outcome
        else:
            assert isinstance(outcome, EnvironmentFault)
            assert "the worker of this episode died 3 times: environments0 has died" in str(outcome)
            assert "it ended with exit code 3" in str(outcome)


async def test_worker_ends_itself_when_calls_hang_in_half_of_its_threads(
    villains: Workers,
) -> None:
    player, worker = Player(villains), villains.process()
    hung = [player.play(i, "hang") for i in range(THREADS // 2)]
    found = await asyncio.gather(*hung, player.play(9, "well"), return_exceptions=True)
    assert all(isinstance(outcome, EnvironmentFault) for outcome in found[:-1])
    worker.wait(SECONDS)
    assert len(await player.play(10, "well")) == 3


@pytest.mark.parametrize("how", ["fork", "child"])
async def test_child_processes_of_an_environment_end_when_its_worker_dies(
    villains: Workers, how: str
) -> None:
    """A child process that inherited the worker's connections would keep its callers waiting."""
    player = Player(villains)
    await player.play(0, how)
    worker = villains.process()
    started = worker.children(recursive=True)
    assert started
    turns = await player.play(1, "well", kill=worker.pid)
    assert len(turns) == 3
    counts = player.sessions.counts
    assert (counts["restored"], counts["replay_mismatches"]) == (1, 0)
    assert counts["steps_repeated"] == counts["workers_lost"] <= 1, "0 if it died before the call"
    psutil.wait_procs(started, timeout=SECONDS)
    assert not any(process.is_running() for process in started)


async def test_calls_do_not_time_out_when_they_wait_for_a_thread(villains: Workers) -> None:
    """There are more calls than threads, and each takes nearly as long as its time limit."""
    player = Player(villains)
    found = await asyncio.gather(*(player.play(i, "slow") for i in range(3 * THREADS)))
    assert [len(turns) for turns in found] == [3] * (3 * THREADS)
    assert player.sessions.counts.total() == 0


async def test_episode_is_closed_when_it_is_forgotten_during_its_start(villains: Workers) -> None:
    player = Player(villains)
    beginning = asyncio.create_task(player.sessions.begin(0, payload("slow_start")))
    await asyncio.sleep(0.2)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    await player.sessions.forget(0)
    assert (villains.folder / "closed").exists()
