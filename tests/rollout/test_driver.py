"""Tests a running driver: the metrics of its batches, the record of its scheduler, and its close.

The metrics are lag, waste, load and warnings, also of a resumed run. Requests and scores that end
while the driver closes start nothing, and their errors are not hidden.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.commands.replay import replay_command
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.engines.interface import EngineStatus, GenerationRequest, TokenChunk
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.errors import ComponentFailure
from megatron_async.rollout import admission
from megatron_async.rollout.manager import ResumePoint
from megatron_async.scheduler import events as ev
from megatron_async.scheduler import record
from megatron_async.scheduler.record import Raised, read_record, record_files
from megatron_async.scheduler.scheduler import Scheduler
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import Prompt, TrajectoryState
from tests.rollout.stand_ins import Engines, Fixed, manager_of, settings, trajectories_in
from tests.rollout.test_manager import Trainer

BATCH = 2
STRAGGLER = 2
"""Id of the trajectory that is still being generated when all others of its time have been
trained."""


def changed(preset: str, **changes: Any) -> RunConfig:
    return build_config(merge(settings(preset).model_dump(), changes))


def with_straggler() -> RunConfig:
    lengths = [4] * 64
    lengths[STRAGGLER] = 60
    return changed(
        "copris", sampling={"max_new_tokens": 64}, experiment={"forced_lengths": lengths}
    )


def lag_in_samples(batch: TokenBatch) -> list[int]:
    """Return the lag of each sequence in samples, computed independently: every batch trains
    `BATCH` samples."""
    index_T = np.repeat(np.arange(batch.num_sequences), batch.lengths_S())
    trained_T = batch.loss_mask_T > 0
    oldest = [batch.version_T[trained_T & (index_T == s)].min() for s in range(batch.num_sequences)]
    return [int(BATCH * (batch.step - version)) for version in oldest]


@pytest.mark.parametrize("resumed_at", [None, 3])
async def test_lag_counts_the_samples_trained_since_a_trajectory_started(
    tmp_path: Path, resumed_at: int | None
) -> None:
    batches: list[TokenBatch] = []
    config = with_straggler()

    async def train(trainer: Trainer, lineage: int, step: int) -> None:
        batches.append(await trainer.batch())
        await trainer.publish(lineage, step + 1)

    trainer, lineage, step = Trainer(tmp_path, config), 0, 0
    await trainer.manager.start()
    await trainer.begin(ResumePoint(0))
    while not batches or STRAGGLER not in batches[-1].trajectory_ids_S:
        await train(trainer, lineage, step)
        step += 1
        if step == resumed_at:
            position = (await trainer.manager.position(0))["store_position"]
            await trainer.manager.checkpoint_finalized(0, step, [])
            await trainer.manager.stop()
            trainer, lineage = Trainer(tmp_path, config), 1
            await trainer.manager.start()
            await trainer.begin(ResumePoint(1, step, parent=0, store_position=position))
    await trainer.manager.stop()
    assert len(batches) > 5, "the straggler must be trained after the resume"
    for batch in batches:
        expected = lag_in_samples(batch)
        assert batch.extra_metrics["rollout/lag_samples_mean"] == np.mean(expected)
        assert batch.extra_metrics["rollout/lag_samples_max"] == max(expected)
    assert max(lag_in_samples(batches[-1])) == BATCH * batches[-1].step, "not from version 0"


class EveryOtherGroup(Fixed):
    """Scorer that gives the responses of even prompts equal rewards, and of odd prompts only the
    first a reward of 1."""

    def __init__(self) -> None:
        self._scored: dict[int, int] = {}

    async def score(self, prompt: Prompt, response_ids: Any) -> tuple[float, dict[str, float]]:
        number = int(prompt.token_ids[1])
        before = self._scored.setdefault(number, 0)
        self._scored[number] += 1
        return float(number % 2 == 0 or before == 0), {}


async def test_tokens_are_counted_when_groups_without_reward_variance_are_dropped(
    tmp_path: Path,
) -> None:
    batches: list[TokenBatch] = []

    trainer = await Trainer(
        tmp_path, changed("sync", schedule={"dynamic_sampling": True}), EveryOtherGroup()
    ).started()
    for step in range(3):
        batches.append(await trainer.batch())
        if step < 2:
            await trainer.publish(0, step + 1)
    await trainer.manager.stop()
    found = trajectories_in(tmp_path).values()
    dropped = [one.response_length for one in found if one.state is TrajectoryState.DROPPED]
    assert len(dropped) == 3 * BATCH

    def total(name: str) -> float:
        return sum(batch.extra_metrics[f"rollout/{name}"] for batch in batches)

    assert total("filtered_tokens") == total("wasted_tokens") == sum(dropped) > 0
    assert total("dropped_filtered") == len(dropped)


async def test_run_ends_with_an_error_when_every_group_is_filtered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Fixed` gives every response the same reward."""
    monkeypatch.setattr(admission, "MAX_FILTERED_ROUNDS", 3)
    config = changed("sync", schedule={"dynamic_sampling": True})

    trainer = await Trainer(tmp_path, config).started()
    with pytest.raises(ComponentFailure, match=r"dropped the last 6 responses \(3 batches' w"):
        await trainer.batch()
    assert "all_filtered" in trainer.manager.status()["warnings"]
    await trainer.manager.stop()


class Storming(SimulatedEngine):
    """Simulated engine that reports `preempted` more preemptions in every load report."""

    preempted = 0
    reports = 0

    async def status(self) -> EngineStatus:
        status = await super().status()
        self.reports += 1
        return replace(
            status, kv_usage=0.75, preemptions_total=1000 + self.preempted * self.reports
        )


@pytest.mark.parametrize("preempted", [0, 9])
async def test_engine_load_and_its_warnings_reach_the_trainer(
    tmp_path: Path, preempted: int
) -> None:
    """The 1,000 preemptions that the engine counted before its first report here are not
    counted."""
    warnings: list[tuple[str, str]] = []

    config = changed("copris")
    trainer = Trainer(tmp_path, config)
    await trainer.manager.start()
    engine = trainer.engines.all[0]
    engine.__class__ = Storming
    assert isinstance(engine, Storming)
    engine.preempted = preempted
    await trainer.begin(ResumePoint(0))
    while engine.reports < 6:
        await asyncio.sleep(0.01)
    batches = [await trainer.batch()]
    warnings.extend((await trainer.publish(0, 1)).warnings)
    batches.append(await trainer.batch())
    repeated = len((await trainer.publish(0, 2)).warnings)
    assert repeated == 0, "a warning was returned twice"
    metrics = batches[1].extra_metrics  # The first batch may precede the first load report.
    assert metrics["rollout/kv_usage"] == 0.75
    assert metrics["rollout/concurrency"] == 4
    seen = sum(batch.extra_metrics["rollout/preemptions"] for batch in batches)
    assert seen % 9 == 0 and (seen > 0) == (preempted > 0)
    assert seen < 1000
    await trainer.manager.stop()
    assert [name for name, _ in warnings] == (["recomputation_storm"] if preempted else [])


async def test_warnings_arrive_with_an_update_when_stale_engines_cause_it(tmp_path: Path) -> None:
    trainer = await Trainer(tmp_path, settings("copris", engines=2, max_restarts=1)).started()
    trainer.engines.all[1].crash("injected crash")
    warnings: tuple[tuple[str, str], ...] = ()
    while not warnings:
        await trainer.manager.next_batch(0)
        warnings = (await trainer.publish(0, 1)).warnings
    assert [name for name, _ in warnings] == ["engine_failed"]
    assert "the process of engine engine1 has ended" in warnings[0][1]
    await trainer.manager.stop()


class Defective(Scheduler):
    """Scheduler that raises LookupError when a batch is taken."""

    def step(self, event: ev.Event) -> list[ev.Action]:
        if isinstance(event, ev.BatchTaken):
            raise LookupError("a defect of the scheduler")
        return super().step(event)


async def test_event_is_recorded_at_once_when_the_scheduler_raises_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tmp_path, settings("async"))

    await trainer.manager.start()
    await trainer.manager.attach(ResumePoint(0))
    trainer.manager._driver._scheduler.__class__ = Defective
    await trainer.publish(0, 0)
    with pytest.raises(LookupError):
        await trainer.batch()
    # Read before `stop`, because the process may die at this point.
    last = list(read_record(tmp_path / "events" / "0.jsonl")[1])[-1]
    await trainer.manager.stop()
    assert isinstance(last.event, ev.BatchTaken)
    assert last.actions == (Raised("LookupError('a defect of the scheduler')"),)
    # The current scheduler has no such defect, so the replay names the event that raised.
    with pytest.raises(ComponentFailure, match=r"BatchTaken.*is the exception LookupError"):
        replay_command(tmp_path, None, timeline=True)
    assert (
        "the scheduler raised LookupError('a defect of the scheduler')" in capsys.readouterr().out
    )


async def test_record_keeps_and_replays_only_the_newest_steps_when_a_run_is_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file has one step here; four files are kept in addition to the one that is written."""
    monkeypatch.setattr(record, "KEPT_STEPS", 1)
    trainer = await Trainer(tmp_path, settings("copris")).started()
    for step in range(10):
        await trainer.batch()
        await trainer.publish(0, step + 1)
    await trainer.manager.stop()
    names = [path.name for path in record_files(tmp_path / "events").values()]
    assert len(names) == 5 and "0.jsonl" not in names
    replay_command(tmp_path, None, timeline=True)
    exchanges = [e for name in names for e in read_record(tmp_path / "events" / name)[1]]
    assert ev.ManyAborted in {type(exchange.event) for exchange in exchanges}
    output = capsys.readouterr().out
    assert output.count("from a snapshot after") == output.count("same actions for") == 5
    assert "batch 9 emitted" in output and "batch 0 emitted" not in output


async def test_first_event_of_a_resume_contains_all_recovered_groups(
    tmp_path: Path,
) -> None:
    """If groups were reported one by one, a batch could be emitted before an older group is
    known."""
    config = settings("async")

    trainer = await Trainer(tmp_path, config).started()
    await trainer.batch()
    await trainer.publish(0, 1)
    position = (await trainer.manager.position(0))["store_position"]
    await trainer.manager.checkpoint_finalized(0, 1, [])
    await trainer.batch()
    await trainer.manager.stop()
    trainer = Trainer(tmp_path, config)
    await trainer.manager.start()
    await trainer.begin(ResumePoint(1, 1, parent=0, store_position=position))
    await trainer.manager.stop()
    events = [exchange.event for exchange in read_record(tmp_path / "events" / "1.jsonl")[1]]
    (found,) = [event for event in events if isinstance(event, ev.Recovered)]
    assert events[0] == found and len(found.groups) > 1


async def test_aborted_requests_are_reported_before_their_engine_is_down(tmp_path: Path) -> None:
    """Otherwise the scheduler would submit requests to an engine that is no longer registered."""
    manager, seen = manager_of(tmp_path, settings("copris"), Engines()), list[object]()

    await manager.start()
    await manager.attach(ResumePoint(0))
    driver = manager._driver
    engine_id = next(iter(driver._tracked_engines))
    driver._tracked_engines[engine_id].up = True
    driver._step = lambda event: seen.append((event, engine_id in driver._tracked_engines))  # type: ignore[method-assign]
    driver._feed(ev.Aborted(1))
    driver.engine_failed(engine_id, "a test")
    await manager.stop()
    assert seen == [(ev.Aborted(1), True), (ev.EngineDown(engine_id), False)]


class Lingering(SimulatedEngine):
    """Simulated engine on which trajectory 0 never ends and takes 0.1 s to be canceled."""

    sent: list[str]
    canceling: asyncio.Event

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.sent.append(request.request_id)
        if request.request_id.startswith("t0-"):
            try:
                await asyncio.Event().wait()
            finally:
                self.canceling.set()
                await asyncio.sleep(0.1)
        async for chunk in super().generate(request):
            yield chunk


class Late(Fixed):
    """Scorer that waits for the event `until` before each score and then returns the result of
    `outcome`."""

    def __init__(self, until: asyncio.Event, outcome: Callable[[], float | None]) -> None:
        self._until, self._outcome = until, outcome
        self.calls = 0

    async def score(
        self, prompt: Prompt, response_ids: Sequence[int]
    ) -> tuple[float | None, dict[str, float]]:
        self.calls += 1
        await self._until.wait()
        return self._outcome(), {}


async def stop_under_scores(folder: Path, outcome: Callable[[], float | None]) -> list[str]:
    """Stop a run while every generated response but trajectory 0 is being scored; the scores end
    during the stop.

    Returns:
        The ids of requests that were sent during the stop.
    """
    canceling, sent = asyncio.Event(), list[str]()
    trainer = Trainer(folder, settings("async"), scorer := Late(canceling, outcome))
    await trainer.manager.start()
    engine = trainer.engines.all[0]
    engine.__class__ = Lingering
    assert isinstance(engine, Lingering)
    engine.sent, engine.canceling = sent, canceling
    await trainer.begin(ResumePoint(0))
    while not sent or scorer.calls < len(sent) - 1:
        await asyncio.sleep(0.01)
    before = len(sent)
    await trainer.manager.stop()
    assert canceling.is_set(), "the stop canceled no request"
    return sent[before:]


async def test_score_starts_no_request_when_it_ends_while_the_driver_closes(tmp_path: Path) -> None:
    """A score without a reward would let another group start. The score is made again after the
    next start."""
    assert await stop_under_scores(tmp_path, lambda: None) == []
    first, *others = [one.state for one in trajectories_in(tmp_path).values()]
    assert first is TrajectoryState.RUNNING  # The next start treats the trajectory as partial.
    assert set(others) == {TrajectoryState.FINISHED}


async def test_exception_is_logged_when_a_scorer_raises_while_the_driver_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def defect() -> None:
        raise LookupError("a defect of the scorer")

    assert await stop_under_scores(tmp_path, defect) == []
    assert "a defect of the scorer" in caplog.text
