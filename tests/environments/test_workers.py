"""Tests that calls of workers which die are repeated, and that the last attempt has the worker
exclusively."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from megatron_async.config import build_config
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.worker import EpisodeStart, EpisodeUnknown, StepResult
from megatron_async.environments.workers import EnvironmentWorkers, EpisodeSessions
from megatron_async.process_backends.backend import RemoteObjectLost, recorded
from megatron_async.trajectory.types import Turn

OPENED = EpisodeStart(({"role": "user", "content": "Begin."},), np.zeros(1, np.int32), None)
KILLERS = range(0, 40, 4)
EPISODES = 40
SECONDS = 60


class Mortal:
    """A worker that dies during every step of a `KILLERS` episode; its running calls fail."""

    def __init__(self) -> None:
        self.open_keys: set[str] = set()
        self.dying = asyncio.Event()
        self.forgotten: list[str] = []
        self.waits = 0.01

    async def call(self, what: Any, *, limit: float) -> Any:
        life = self.dying
        call = recorded(what)
        method, key = call.method, call.arguments[0]
        number = int(key.split(".")[1])
        if method == "step" and key not in self.open_keys:
            raise EpisodeUnknown(key)
        if method == "step" and number in KILLERS:
            await asyncio.sleep(self.waits / 2)
            self.open_keys, self.dying = set(), asyncio.Event()
            life.set()
            raise RemoteObjectLost("it died")
        waiting = asyncio.create_task(life.wait())
        done, _ = await asyncio.wait([waiting], timeout=self.waits)
        if done:
            raise RemoteObjectLost("it died")
        waiting.cancel()
        if method in ("begin", "restore"):
            self.open_keys.add(key)
        if method == "forget":
            self.open_keys.discard(key)
            self.forgotten.append(key)
        return {"begin": OPENED, "step": StepResult({}, 1.0, ended="stop")}.get(method)


class MortalBackend:
    def start(self, *arguments: Any, **options: Any) -> Mortal:
        self.worker = Mortal()
        return self.worker


async def played(sessions: EpisodeSessions, number: int) -> StepResult:
    opened = await sessions.begin(number, {})
    return await sessions.step(
        number, {}, [Turn(0, None, 0, opened.messages)], [1], input_budget=10, last=False
    )


async def test_other_episodes_succeed_when_many_episodes_kill_their_worker() -> None:
    sessions = EpisodeSessions(EnvironmentWorkers(build_config({}), MortalBackend()))  # type: ignore[arg-type]
    found = await asyncio.gather(
        *(played(sessions, number) for number in range(EPISODES)), return_exceptions=True
    )
    for number, outcome in enumerate(found):
        if number in KILLERS:
            assert isinstance(outcome, EnvironmentFault)
            assert "the worker of this episode died 3 times: it died" in str(outcome)
        else:
            assert isinstance(outcome, StepResult), outcome
    assert sessions.counts["workers_lost"] >= 3 * len(KILLERS)


@pytest.mark.parametrize("method", ["begin", "step"])
async def test_worker_forgets_an_episode_when_the_call_of_its_caller_is_canceled(
    method: str,
) -> None:
    """Dropped and restarted trajectories cancel their calls; no episode may stay open."""
    backend = MortalBackend()
    sessions = EpisodeSessions(EnvironmentWorkers(build_config({}), backend))  # type: ignore[arg-type]
    opened = await sessions.begin(1, {}) if method == "step" else OPENED
    backend.worker.waits = 3600
    turns = [Turn(0, None, 0, opened.messages)]
    asking = {
        "begin": lambda: sessions.begin(1, {}),
        "step": lambda: sessions.step(1, {}, turns, [1], input_budget=1, last=False),
    }
    call = asyncio.create_task(asking[method]())
    await asyncio.sleep(0.01)
    call.cancel()
    backend.worker.waits = 0.001
    await sessions.forget(1)
    assert [key.split(".")[1] for key in backend.worker.forgotten] == ["1"]
    assert not backend.worker.open_keys
