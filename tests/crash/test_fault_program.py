"""Tests that the fault program finds planted defects and finds no defect in the product.

Each planted defect removes the code that keeps one promise, so that a run with a few faults breaks
this promise.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_async.rollout.driver import RolloutDriver
from megatron_async.rollout.generation import RunningRequest
from megatron_async.rollout.monitor import EngineMonitor
from megatron_async.rollout.tracked_engine import TrackedEngine
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FinishReason, PolicyVersion, RequestKey
from tests.crash.faults import Fault
from tests.crash.world import Result, settings, suffer
from tests.store.disk import needs_compiler

pytestmark = [pytest.mark.slow, pytest.mark.timeout(540)]


def result_of(folder: Path, preset: str, faults: Sequence[Fault], edges: Any = None) -> Result:
    return asyncio.run(suffer(folder / "run", settings(preset), faults, edges=edges))


def found(result: Result, check: str) -> bool:
    return any(sentence.startswith(check) for sentence in result.broken)


def accept_any_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store accept chunks of any request of a running trajectory, also of stale engines.

    Only the current request may end the trajectory. A second end would stop the run with an error,
    but this defect must show only in the tokens.
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

    async def with_a_stale_engine(driver: RolloutDriver, *args: Any) -> TokenBatch | TrainerTask:
        batch = await next_batch(driver, *args)
        if isinstance(batch, TokenBatch):
            driver.engine_stale(sorted(driver._tracked_engines)[0], "a test asks for it")
        return batch

    monkeypatch.setattr(TrajectoryStore, "append", by_whoever_runs)
    monkeypatch.setattr(RunningRequest, "cancel", lambda request: None)
    monkeypatch.setattr(RolloutDriver, "next_batch", with_a_stale_engine)


def accept_unverified_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the store accept the tokens of an engine before its weights have been verified."""

    async def wait_accepted(tracked: TrackedEngine, version: PolicyVersion) -> bool:
        return True

    monkeypatch.setattr(TrackedEngine, "wait_accepted", wait_accepted)


def emit_a_batch_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trainer receive the first batch a second time instead of the second batch."""
    taken: list[TokenBatch] = []
    next_batch = RolloutDriver.next_batch

    async def again(driver: RolloutDriver, *args: Any) -> TokenBatch | TrainerTask:
        batch = await next_batch(driver, *args)
        if not isinstance(batch, TokenBatch):
            return batch
        taken.append(batch)
        return replace(taken[0], step=batch.step) if len(taken) == 2 else batch

    monkeypatch.setattr(RolloutDriver, "next_batch", again)


# The last value is the number of runs that the audit gets. `accept_any_request` had no effect in 2
# of 30 runs, because the requests of a stale engine may end before they send wrong tokens.
PLANTED: list[tuple[str, str, Callable[[pytest.MonkeyPatch], None], list[Fault], int]] = [
    ("wrong tokens: ", "pipeline", accept_any_request, [Fault("trainer pauses", seconds=0.2)], 5),
    (
        "wrong tokens: ",
        "pipeline",
        accept_unverified_tokens,
        [Fault("engine holds another version than it reports", target=i) for i in range(3)],
        1,
    ),
    (
        "trained twice: ",
        "async",
        emit_a_batch_twice,
        [Fault("trainer pauses", 0.1, seconds=0.2)],
        1,
    ),
]


@pytest.mark.parametrize(("check", "preset", "plant", "faults", "runs"), PLANTED)
def test_audit_finds_the_broken_promise_when_a_defect_is_planted(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    check: str,
    preset: str,
    plant: Callable[[pytest.MonkeyPatch], None],
    faults: list[Fault],
    runs: int,
) -> None:
    plant(monkeypatch)
    results = (result_of(tmp_path / str(number), preset, faults) for number in range(runs))
    assert any(found(result, check) for result in results)


class Clock:
    """Stand-in for `Edges` whose clock only the planted defect reads."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def disk(self, kind: str = "") -> None:
        """Do nothing, because these tests inject no fault of the disk."""

    def jump(self, seconds: float) -> None:
        self.ahead += seconds

    def heal(self) -> None:
        """Do nothing, because the disk always works."""


@pytest.mark.parametrize("planted", [True, False])
def test_audit_finds_replaced_engines_only_when_the_monitor_reads_the_wall_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: bool
) -> None:
    """The planted monitor replaces an engine that it has not polled for 60 s of the wall clock."""
    clock, seen = Clock(), dict[TrackedEngine, float]()
    works = EngineMonitor._poll_engine

    async def works_by_the_wall_clock(monitor: EngineMonitor, tracked: TrackedEngine) -> bool:
        now = time.monotonic() + clock.ahead
        if now - seen.setdefault(tracked, now) > 60.0:
            monitor.give_up(tracked, f"engine {tracked.engine_id} was not seen for a minute")
        seen[tracked] = now
        return await works(monitor, tracked)

    if planted:
        monkeypatch.setattr(EngineMonitor, "_poll_engine", works_by_the_wall_clock)
    faults = [Fault("clock jumps ahead", 1.0, seconds=3600.0), Fault("second run", 1.0)]
    result = result_of(tmp_path, "async", faults, edges=clock)
    assert found(result, "healthy engines given up") is planted, result.broken
    assert planted or not result.broken


@needs_compiler
@pytest.mark.timeout(300)
def test_fault_program_finds_no_broken_promise_in_the_product(tmp_path: Path) -> None:
    """A failure prints the command that repeats its sequence of faults.

    To inject more faults, run the same command by hand with a larger `--seconds`.
    """
    command = [sys.executable, "-m", "tests.crash.fault_program", "--faults", "500"]
    command += ["--seed", "7", "--seconds", "75", "--keep", str(tmp_path / "runs")]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    kept = re.findall(r"^\d+ (\w+): [1-9]\d* faults, .* 0 broken promises$", done.stdout, re.M)
    assert len(set(kept)) >= 3, done.stdout[-6000:]
