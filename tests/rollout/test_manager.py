"""Tests the manager with one trainer after another: attach, resume, and engines that a trainer left
behind.

The simulated engines run in this process; the trainer only makes the calls of a real one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Self

import pytest

from megatron_async.config import RunConfig
from megatron_async.engines.interface import (
    EngineError,
    EngineStatus,
    GenerationRequest,
    TokenChunk,
)
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.errors import ComponentFailure, ProcessKilled
from megatron_async.rollout.manager import NotAttached, ResumePoint, RolloutManager, UpdateReport
from megatron_async.rollout.trainer_task import TrainerTask
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import PolicyVersion, Prompt
from tests.rollout.stand_ins import (
    Engines,
    Fixed,
    manager_of,
    settings,
    trainer_logprobs,
    trajectories_in,
)


class RecordingTask(Fixed):
    """Task that also records which ranges of prompts were read."""

    def __init__(self, read: list[range]) -> None:
        self._read = read

    def train_prompts(self, position: int, count: int) -> list[Prompt]:
        self._read.append(range(position, position + count))
        return super().train_prompts(position, count)


class Trainer:
    """Trainer that calls a manager as `train_loop/loop.py` does, without training."""

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        task: Fixed | None = None,
        engines: Engines | None = None,
    ) -> None:
        self.engines = engines or Engines()
        self.manager = manager_of(folder, config, self.engines, task)
        self.lineage = 0

    async def publish(self, lineage: int, number: int) -> UpdateReport:
        self.lineage = lineage
        addresses = await self.manager.begin_update(lineage, number)
        for engine in self.engines.all:
            if not engine._crash_reason:
                engine.set_weights(PolicyVersion(lineage, number))
        ids = [address.engine_id for address in addresses]
        await self.manager.end_update(lineage, number, ids, False)
        return await self.manager.verify_update(lineage, number, None, False)

    async def started(self) -> Self:
        """Start the manager and a new run."""
        await self.manager.start()
        await self.begin(ResumePoint(0))
        return self

    async def begin(self, resume: ResumePoint) -> None:
        await self.manager.attach(resume)
        await self.publish(resume.lineage, resume.step)

    async def batch(self) -> TokenBatch:
        batch = await self.manager.next_batch(self.lineage)
        assert isinstance(batch, TokenBatch)
        return batch


def prompts_of(batch: TokenBatch) -> dict[int, int]:
    """Return the number of each trajectory's prompt in the task; `Fixed` writes it into the second
    token."""
    prompts_S = batch.token_ids_T[batch.cu_seqlens_S1[:-1] + 1]
    return dict(zip(batch.trajectory_ids_S.tolist(), prompts_S.tolist(), strict=True))


@pytest.mark.parametrize("lost", ["trainer", "everything"])
@pytest.mark.parametrize("preset", ["sync", "copris", "async"])
async def test_resumed_run_continues_after_the_last_admitted_prompt(
    tmp_path: Path, preset: str, lost: str
) -> None:
    """No prompt is used twice and none is skipped, although prompts were admitted after the
    checkpoint."""
    read: list[range] = []
    consumed: dict[int, dict[int, int]] = {}  # Prompts by step, on the surviving lineage.
    config = settings(preset)

    async def train(trainer: Trainer, lineage: int, steps: range) -> None:
        for step in steps:
            consumed[step] = prompts_of(await trainer.batch())
            await trainer.publish(lineage, step + 1)

    trainer = await Trainer(tmp_path, config, RecordingTask(read)).started()
    await train(trainer, 0, range(3))
    position = (await trainer.manager.position(0))["store_position"]
    await trainer.manager.checkpoint_finalized(0, 3, [])
    await train(trainer, 0, range(3, 6))
    if lost == "everything":
        await trainer.manager.stop()  # The tests in tests/crash kill the process instead.
        trainer = Trainer(tmp_path, config, RecordingTask(read))
        await trainer.manager.start()
    await trainer.begin(ResumePoint(1, 3, parent=0, store_position=position))
    await train(trainer, 1, range(3, 12))
    await trainer.manager.stop()
    assert [part.start for part in read] == [0, *(part.stop for part in read[:-1])]
    admitted = read[-1].stop
    trained = {i: prompt for batch in consumed.values() for i, prompt in batch.items()}
    found = trajectories_in(tmp_path)
    waiting = [int(one.prompt.token_ids[1]) for i, one in found.items() if i not in trained]
    assert len(trained) == 12 * config.schedule.group_size, "a trajectory is in two batches"
    assert sorted([*trained.values(), *waiting]) == sorted(2 * list(range(admitted)))


async def test_event_loop_keeps_running_while_a_store_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a large file takes seconds."""
    status_read = threading.Event()
    open_store = TrajectoryStore.open

    def slowly(*arguments: Any, **named: Any) -> TrajectoryStore:
        assert status_read.wait(20)
        return open_store(*arguments, **named)

    trainer = Trainer(tmp_path, settings("async"))
    await trainer.manager.start()
    monkeypatch.setattr(TrajectoryStore, "open", slowly)
    attaching = asyncio.create_task(trainer.manager.attach(ResumePoint(0)))
    await asyncio.sleep(0.05)
    assert trainer.manager.status() == {}
    status_read.set()
    await attaching
    assert trainer.manager.status()["states"]["pending"] == 0
    await trainer.manager.stop()


@pytest.mark.parametrize("preset", ["pipeline", "async"])
async def test_next_trainer_is_served_when_its_predecessor_left_engines_paused(
    tmp_path: Path, preset: str
) -> None:
    trainer = await Trainer(tmp_path, settings(preset)).started()
    assert (await trainer.batch()).step == 0
    await trainer.manager.begin_update(0, 1)
    assert trainer.engines.all[0]._paused
    await trainer.begin(ResumePoint(1, 0, parent=0))
    assert (await trainer.batch()).step == 0
    await trainer.manager.stop()


async def test_restarted_manager_continues_at_the_step_of_the_trainer(
    tmp_path: Path,
) -> None:
    first = await Trainer(tmp_path, settings("async")).started()
    trained = set((await first.batch()).trajectory_ids_S.tolist())
    await first.manager.stop()  # The tests in tests/crash kill the process instead.

    second = Trainer(tmp_path, settings("async"))
    await second.manager.start()
    with pytest.raises(NotAttached):
        await second.manager.next_batch(0)
    await second.begin(ResumePoint(0, 1))
    batch = await second.batch()
    assert batch.step == 1
    assert trained.isdisjoint(batch.trajectory_ids_S.tolist())
    await second.manager.stop()
    assert {p.name for p in (tmp_path / "events").iterdir()} == {"0.jsonl", "0.1.jsonl"}


async def test_concurrent_attaches_run_in_order_and_an_old_lineage_is_refused(
    tmp_path: Path,
) -> None:
    trainer = await Trainer(tmp_path, settings("async")).started()
    await trainer.batch()
    again = [trainer.manager.attach(ResumePoint(n, 0, parent=0)) for n in (1, 2)]
    await asyncio.gather(*again)
    with pytest.raises(ComponentFailure, match="lineage 1 is superseded"):
        await trainer.manager.attach(ResumePoint(1, 0, parent=0))
    await trainer.publish(2, 0)
    assert (await trainer.batch()).step == 0
    await trainer.manager.stop()


@pytest.mark.parametrize("last", [False, True])
async def test_running_call_changes_nothing_when_its_trainer_is_superseded(
    tmp_path: Path, last: bool
) -> None:
    """The trainer's update was being verified when it died. The engine has not loaded its
    successor's weights."""
    verifying, proceed = asyncio.Event(), asyncio.Event()

    class Slow(SimulatedEngine):
        async def checksum(self) -> str:
            verifying.set()
            await proceed.wait()
            return await super().checksum()

    trainer = Trainer(tmp_path, settings("async"))
    manager = trainer.manager
    await manager.start()
    await trainer.begin(ResumePoint(0))
    await trainer.batch()
    [engine] = trainer.engines.all
    engine.__class__ = Slow
    number = 100 if last else 1
    await manager.begin_update(0, number)
    engine.set_weights(PolicyVersion(0, number))

    async def verification() -> None:
        await manager.end_update(0, number, [engine.engine_id], True)
        await manager.verification_samples(0, number)

    late = asyncio.create_task(verification())
    await verifying.wait()
    await manager.attach(ResumePoint(1, 0, parent=0))
    proceed.set()
    with pytest.raises(ComponentFailure, match="lineage 0 is superseded"):
        await late
    assert manager.status()["engines_up"] == 0
    await trainer.publish(1, 0)
    assert (await trainer.batch()).step == 0
    await manager.stop()


LATE: dict[str, Callable[[RolloutManager], Any]] = {
    "next_batch": lambda manager: manager.next_batch(0),
    "drop_batch": lambda manager: manager.drop_batch(0, 0, "nonfinite"),
    "begin_update": lambda manager: manager.begin_update(0, 1),
    "end_update": lambda manager: manager.end_update(0, 1, ["engine0"], False),
    "verification_samples": lambda manager: manager.verification_samples(0, 1),
    "verify_update": lambda manager: manager.verify_update(0, 1, None, False),
    "evaluate": lambda manager: manager.evaluate(0, 0),
    "position": lambda manager: manager.position(0),
    "checkpoint_finalized": lambda manager: manager.checkpoint_finalized(0, 1, []),
}


async def test_warning_names_the_database_once_when_it_was_removed(tmp_path: Path) -> None:
    warnings: list[tuple[str, str]] = []

    trainer = await Trainer(tmp_path, settings("copris"), None, Engines()).started()
    for step in range(4):
        await trainer.batch()
        report = await trainer.publish(0, step + 1)
        warnings.extend(report.warnings)
        (tmp_path / "store.sqlite").unlink(missing_ok=True)
    await trainer.manager.stop()
    found = [message for name, message in warnings if name == "store_lost"]
    assert len(found) == 1 and str(tmp_path / "store.sqlite") in found[0]


@pytest.mark.parametrize("call", LATE)
async def test_later_call_is_refused_when_its_trainer_is_superseded(
    tmp_path: Path, call: str
) -> None:
    """The trainer made no call when its successor attached."""
    trainer = Trainer(tmp_path, settings("async"))
    manager = trainer.manager
    await manager.start()
    await trainer.begin(ResumePoint(0))
    await trainer.batch()
    await trainer.begin(ResumePoint(1, 0, parent=0))
    batch = await trainer.batch()
    with pytest.raises(ComponentFailure, match="0 is superseded by that of lineage 1"):
        answer = LATE[call](manager)
        if asyncio.iscoroutine(answer):
            await answer
    assert manager.status()["version"] == "1.0"
    assert manager.status()["states"]["dropped"] == 0
    await trainer.publish(1, 1)
    following = await trainer.batch()
    assert following.step == 1
    assert not set(following.trajectory_ids_S) & set(batch.trajectory_ids_S)
    await manager.stop()
    with closing(StoreReader(tmp_path / "store.sqlite")) as reader:
        assert not reader.content().checkpoints


@pytest.mark.parametrize(
    ("end", "why"),
    [
        (lambda manager: manager.attach(ResumePoint(1, 0, parent=0)), "by that of lineage 1"),
        (lambda manager: manager.attach(ResumePoint(0)), "lineage 0 has attached again"),
        (lambda manager: manager.stop(), "the rollout manager was stopped"),
    ],
    ids=["replaced", "attached again", "stopped"],
)
async def test_wait_for_a_batch_ends_at_once_when_its_session_ends(
    tmp_path: Path, end: Callable[[RolloutManager], Any], why: str
) -> None:
    manager = Trainer(tmp_path, settings("async")).manager
    await manager.start()
    await manager.attach(ResumePoint(0))
    assert await manager.next_batch(0) is TrainerTask.SEND_WEIGHTS
    # Without this, `next_batch` would return without waiting for a batch.
    manager._driver._stale.clear()
    late = asyncio.create_task(manager.next_batch(0))
    await asyncio.sleep(0.05)
    await end(manager)
    async with asyncio.timeout(1):  # This is less than trainer.wait_for_batch_seconds, which is 5.
        with pytest.raises(ComponentFailure, match=why):
            await late
    await manager.stop()


async def test_batch_is_not_returned_when_its_trainer_was_just_superseded(
    tmp_path: Path,
) -> None:
    trainer = Trainer(tmp_path, settings("async"))
    manager = trainer.manager
    await manager.start()
    await trainer.begin(ResumePoint(0))
    while not manager._driver._batches.qsize():
        await asyncio.sleep(0.01)
    late = asyncio.create_task(manager.next_batch(0))
    await asyncio.sleep(0)
    await manager.attach(ResumePoint(1, 0, parent=0))
    with pytest.raises(ComponentFailure):
        await late
    await manager.stop()


async def test_call_raises_not_attached_when_the_manager_does_not_know_the_trainer(
    tmp_path: Path,
) -> None:
    """No trainer is attached, or only an earlier one. The caller's client attaches again on this
    error."""
    manager = Trainer(tmp_path, settings("async")).manager
    await manager.start()
    with pytest.raises(NotAttached, match="no trainer of lineage 0"):
        await manager.next_batch(0)
    await manager.attach(ResumePoint(0))
    with pytest.raises(NotAttached, match="no trainer of lineage 1"):
        await manager.next_batch(1)
    await manager.stop()


async def test_evaluation_has_a_separate_time_limit(
    tmp_path: Path,
) -> None:
    class NeverDone(SimulatedEngine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            if request.request_id.startswith("eval"):
                await asyncio.Event().wait()
            async for chunk in super().generate(request):
                yield chunk

    config = settings("async")
    limited = config.eval.model_copy(update={"timeout_seconds": 0.2})
    trainer = Trainer(tmp_path, config.model_copy(update={"eval": limited}))
    await trainer.manager.start()
    trainer.engines.all[0].__class__ = NeverDone
    await trainer.manager.attach(ResumePoint(0))
    assert (await trainer.publish(0, 0)).evaluation_due
    with pytest.raises(ComponentFailure, match=r"within 0\.2 s, eval\.timeout_seconds"):
        await trainer.manager.evaluate(0, 0)
    assert (await trainer.batch()).step == 0
    await trainer.manager.stop()


@pytest.mark.parametrize(
    ("failures", "max_restarts", "starts"),
    [
        ([ProcessKilled("killed")], 1, True),
        ([ProcessKilled("killed"), ProcessKilled("killed")], 1, False),
        ([ComponentFailure("no such model")], 1, False),
    ],
)
async def test_engine_is_started_again_when_it_is_killed_during_the_start(
    tmp_path: Path, failures: list[ComponentFailure], max_restarts: int, starts: bool
) -> None:
    trainer = Trainer(tmp_path, settings("async", max_restarts=max_restarts))
    trainer.engines.failures = failures
    if not starts:
        with pytest.raises(ComponentFailure):
            await trainer.manager.start()
        return
    await trainer.manager.start()
    await trainer.begin(ResumePoint(0))
    assert (await trainer.batch()).step == 0
    await trainer.manager.stop()


async def test_update_waits_at_a_boundary_when_an_ended_request_is_not_removed(
    tmp_path: Path,
) -> None:
    """SGLang would refuse the update. Flushing the engine's cache waits until the request is
    removed."""
    leaving = asyncio.Event()

    class Leaving(SimulatedEngine):
        async def flush_cache(self) -> None:
            await asyncio.wait_for(leaving.wait(), 5)
            await super().flush_cache()

    trainer = Trainer(tmp_path, settings("sync", engines=2))
    await trainer.manager.start()
    leaving.set()
    await trainer.begin(ResumePoint(0))
    first, second = trainer.engines.all
    first.__class__ = second.__class__ = Leaving
    assert (await trainer.batch()).step == 0
    leaving.clear()
    update = asyncio.create_task(trainer.manager.begin_update(0, 1))
    await asyncio.sleep(0.1)
    assert not update.done()
    second.crash()
    leaving.set()
    assert [address.engine_id for address in await update] == ["engine0"]
    await trainer.manager.stop()


async def test_late_error_of_a_replaced_engine_does_not_affect_the_new_engine(
    tmp_path: Path,
) -> None:
    """Both engines have the same id."""
    polled, proceed = asyncio.Event(), asyncio.Event()

    class Slow(SimulatedEngine):
        async def status(self) -> EngineStatus:
            polled.set()
            await proceed.wait()
            raise EngineError("the old engine0 has gone")

    trainer = Trainer(tmp_path, settings("async", max_restarts=5))
    await trainer.manager.start()
    trainer.engines.all[0].__class__ = Slow
    await trainer.begin(ResumePoint(0))
    await polled.wait()
    driver = trainer.manager._driver
    driver.engine_failed("engine0", "killed")
    while not driver.engines():
        await asyncio.sleep(0.01)
    proceed.set()
    await asyncio.sleep(0.05)
    [tracked] = driver._tracked_engines.values()
    assert not tracked.given_up and tracked.check is None
    await trainer.manager.stop()


@pytest.mark.parametrize("verify", [False, True])
async def test_paused_requests_continue_with_the_next_weights_when_the_boundary_pauses(
    tmp_path: Path, verify: bool
) -> None:
    """No request is ended, and engines generate nothing while the trainer works. With `verify`,
    engines sample tokens for the verification before they are paused."""
    config = settings("copris")
    changes = {
        "boundary": "pause",
        "weight_update": "in_flight",
        "kv": "keep",
        "groups_per_batch": 1,
        "concurrency": 8,
    }
    schedule = config.schedule.model_copy(update=changes)
    schedule.check()
    requests: list[str] = []

    class Recording(SimulatedEngine):
        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            requests.append(request.request_id)
            async for chunk in super().generate(request):
                yield chunk

    trainer = Trainer(tmp_path, config.model_copy(update={"schedule": schedule}))
    manager = trainer.manager
    await manager.start()
    trainer.engines.all[0].__class__ = Recording
    await manager.attach(ResumePoint(0))
    batches = []
    for number in range(6):
        addresses = await manager.begin_update(0, number)
        for engine in trainer.engines.all:
            assert number == 0 or engine._paused
            engine.set_weights(PolicyVersion(0, number))
        ids = [address.engine_id for address in addresses]
        await manager.end_update(0, number, ids, verify)
        samples = await manager.verification_samples(0, number)
        logprobs_T = None if samples is None else trainer_logprobs(samples)
        assert (await manager.verify_update(0, number, logprobs_T, True)).passed
        batches.append(await trainer.batch())
        [engine] = trainer.engines.all
        while not engine._paused:
            await asyncio.sleep(0.001)
        generated = engine.tokens_generated
        await asyncio.sleep(0.02)
        assert engine.tokens_generated == generated, "the trainer is working"
    await manager.stop()
    trajectories = [name.partition("-")[0] for name in requests if name.startswith("t")]
    assert len(trajectories) > 12 and len(set(trajectories)) == len(trajectories)
    assert max(batch.lag_T.max() for batch in batches) > 0, "no request continued after an update"
