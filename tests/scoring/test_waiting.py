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

from megatron_async.scoring.process import ScorerCrash, ScorerProcess
from megatron_async.scoring.waiting import WaitingScorer
from megatron_async.scoring.work import Work
from tests.scoring.rewards.test_own import PAYLOAD, own, settings_of

Run = Callable[[Coroutine[Any, Any, None]], None]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    found: Run = pytest.importorskip(request.param).run
    return found


def work(response: str) -> Work:
    return Work(0, PAYLOAD, (response,))


def test_scores_that_were_found_before_the_end_count_though_the_loop_was_busy(run: Run) -> None:
    async def body() -> None:
        scorer = WaitingScorer(settings_of(own("ends_its_process", arguments={"seconds": 0.3})))
        link = await scorer._connected()
        asked = [link.ask(work(text), 20.0) for text in [*["ok"] * 20, "die"]]
        answers = asyncio.gather(*asked, return_exceptions=True)
        await asyncio.sleep(0.1)
        time.sleep(1.5)
        *found, ended = await answers
        assert [answer["scores"][0][0] for answer in found] == [1.0] * 20
        assert isinstance(ended, ScorerCrash) and link.closed

    run(body())


def test_the_end_closes_no_descriptor_that_is_another_files_by_then(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[int, int]] = []
    end = ScorerProcess.end

    def end_and_open(process: ScorerProcess) -> None:
        number = process.requests.fileno()
        end(process)
        with Path(os.devnull).open() as file:
            opened.append((number, fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, number)))

    async def body() -> None:
        link = await WaitingScorer(settings_of(own("ends_its_process")))._connected()
        monkeypatch.setattr(ScorerProcess, "end", end_and_open)
        with pytest.raises(ScorerCrash):
            await link.ask(work("die"), 20.0)
        await asyncio.sleep(0.1)

    run(body())
    ((number, descriptor),) = opened
    assert number == descriptor
    os.close(descriptor)  # fails where somebody has closed it
