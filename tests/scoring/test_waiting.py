"""The process of asynchronous rewards ends by itself: what it had found counts, nothing else ends.

Also on uvloop, which Ray runs the rollout manager with where it is installed.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from megatron_async.scoring.frames import WAITING
from megatron_async.scoring.process import ScorerCrash, ScorerProcess
from megatron_async.scoring.work import Work
from tests.scoring.rewards.test_own import PAYLOAD, own, settings_of

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = pytest.importorskip(request.param).run
    return found


async def started(reward: str, **arguments: float) -> ScorerProcess:
    process = ScorerProcess(settings_of(own(reward, arguments=arguments)), WAITING)
    assert await process.ready() == [True]
    return process


async def asked_for(process: ScorerProcess, response: str) -> dict[str, Any]:
    (reply,) = [reply async for reply in process.ask([Work(0, PAYLOAD, (response,))])]
    return reply


def test_scores_that_were_found_before_the_end_count_though_the_loop_was_busy(run: Run) -> None:
    async def body() -> None:
        process = await started("ends_its_process", seconds=0.3)
        asked = [asked_for(process, text) for text in [*["ok"] * 20, "die"]]
        answers = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        *found, ended = await answers
        for answer in found:
            assert not isinstance(answer, BaseException) and answer["scores"][0][0] == 1.0
        assert isinstance(ended, ScorerCrash) and process.closed
        await process.finish()

    run(body())


def test_the_end_closes_no_descriptor_that_is_another_files_by_then(run: Run) -> None:
    opened: list[tuple[int, int]] = []

    async def body() -> None:
        process = await started("ends_its_process")
        with pytest.raises(ScorerCrash):
            await asked_for(process, "die")
        number = process.requests.fileno()
        await process.finish()
        with Path(os.devnull).open() as file:
            opened.append((number, fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, number)))
        await asyncio.sleep(0.1)

    run(body())
    ((number, descriptor),) = opened
    assert number == descriptor
    os.close(descriptor)  # fails where somebody has closed it
