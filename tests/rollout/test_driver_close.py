"""What ends while the rollout driver closes: nothing follows from it, and nothing is hidden."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from megatron_async.engines.interface import GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.rollout.manager import ResumePoint
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.types import Prompt, TrajectoryState
from tests.rollout.stand_ins import Fixed, settings
from tests.rollout.test_manager import Trainer


class Lingering(SimulatedEngine):
    """Trajectory 0 never ends, and to cancel its request takes a while."""

    sent: list[str]
    cancelling: asyncio.Event

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.sent.append(request.request_id)
        if request.request_id.startswith("t0-"):
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelling.set()
                await asyncio.sleep(0.1)
        async for chunk in super().generate(request):
            yield chunk


class Late(Fixed):
    """Every score waits for the event; then `outcome` makes it."""

    def __init__(self, until: asyncio.Event, outcome: Callable[[], float | None]) -> None:
        self._until, self._outcome = until, outcome
        self.asked = 0

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        self.asked += 1
        await self._until.wait()
        return self._outcome(), {}


async def stop_under_scores(folder: Path, outcome: Callable[[], float | None]) -> list[str]:
    """Stops when all that it generates but trajectory 0 is being scored.

    Returns the requests that were sent while it stopped. The scores end meanwhile.
    """
    cancelling, sent = asyncio.Event(), list[str]()
    trainer = Trainer(folder, settings("async"), scorer := Late(cancelling, outcome))
    await trainer.manager.start()
    engine = trainer.engines.all[0]
    engine.__class__ = Lingering
    assert isinstance(engine, Lingering)
    engine.sent, engine.cancelling = sent, cancelling
    await trainer.begin(ResumePoint(0))
    while not sent or scorer.asked < len(sent) - 1:
        await asyncio.sleep(0.01)
    before = len(sent)
    await trainer.manager.stop()
    assert cancelling.is_set(), "there was nothing to wait for"
    return sent[before:]


async def test_a_score_that_ends_meanwhile_starts_no_request(tmp_path: Path) -> None:
    """One without a reward makes room for another group. It is made again after the next start."""
    assert await stop_under_scores(tmp_path, lambda: None) == []
    with closing(StoreReader(tmp_path / "store.sqlite")) as reader:
        first, *others = [entry.state for entry in reader.summaries()]
    assert first is TrajectoryState.RUNNING  # to the next start that is a partial one
    assert set(others) == {TrajectoryState.FINISHED}


async def test_a_defect_that_shows_meanwhile_is_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def defect() -> None:
        raise LookupError("a defect of the scorer")

    assert await stop_under_scores(tmp_path, defect) == []
    assert "a defect of the scorer" in caplog.text
