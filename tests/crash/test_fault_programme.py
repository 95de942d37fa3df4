"""The fault programme finds defects that are planted, and finds none in the product.

Each planted defect takes away what keeps one promise; a run with a few faults then breaks it.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_async.rollout.driver import RolloutDriver
from megatron_async.rollout.engine_slot import EngineSlot
from megatron_async.rollout.generation import RunningRequest
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FinishReason, PolicyVersion, RequestKey
from tests.crash.faults import Fault
from tests.crash.world import settings, suffer
from tests.store.disk import needs_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


def accept_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store takes what any stream brings while its trajectory runs; stale engines stream on.

    Nothing but the content shows it: only the current request may end a trajectory, so that none
    ends twice, which would end the run with a sentence.
    """
    append = TrajectoryStore.append

    def by_whoever_runs(
        store: TrajectoryStore,
        request: RequestKey,
        *chunk: Any,
        end: FinishReason | None = None,
        **columns: Any,
    ) -> None:
        record = store._state.records.get(request.trajectory_id)
        if end is None and record is not None and record.request is not None:
            request = record.request
        append(store, request, *chunk, end=end, **columns)

    next_batch = RolloutDriver.next_batch

    async def with_a_stale_engine(driver: RolloutDriver, timeout: float) -> TokenBatch | None:
        batch = await next_batch(driver, timeout)
        if batch is not None:
            driver.engine_stale(sorted(driver._slots)[0], "a test asks for it")
        return batch

    monkeypatch.setattr(TrajectoryStore, "append", by_whoever_runs)
    monkeypatch.setattr(RunningRequest, "cancel", lambda request: None)
    monkeypatch.setattr(RolloutDriver, "next_batch", with_a_stale_engine)


def accept_unverified_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an engine generates is stored before its weights have been verified."""

    async def passes(slot: EngineSlot, version: PolicyVersion) -> bool:
        return True

    monkeypatch.setattr(EngineSlot, "passes", passes)


@pytest.mark.parametrize(
    ("plant", "faults"),
    [
        (accept_any_request, [Fault("trainer pauses", seconds=0.2)]),
        (
            accept_unverified_tokens,
            [Fault("engine holds another version than it reports", target=i) for i in range(3)],
        ),
    ],
)
def test_a_planted_defect_is_found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    faults: list[Fault],
) -> None:
    plant(monkeypatch)
    result = asyncio.run(suffer(tmp_path / "run", settings("pipeline"), faults))
    assert any(sentence.startswith("wrong tokens: ") for sentence in result.broken), result.broken


@needs_compiler
@pytest.mark.timeout(300)
def test_random_faults_break_no_promise(tmp_path: Path) -> None:
    """As many as fit into 100 s; a failure prints the command that repeats its sequence."""
    command = [sys.executable, "-m", "tests.crash.fault_programme", "--faults", "500"]
    command += ["--seed", "7", "--seconds", "100", "--keep", str(tmp_path / "runs")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    kept = re.findall(r"^\d+ (\w+): [1-9]\d* faults, .* 0 broken promises$", done.stdout, re.M)
    assert len(set(kept)) >= 3, done.stdout[-6000:]
