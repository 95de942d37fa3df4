"""What a run records of its scheduler when the scheduler has a defect."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from megatron_async.commands.replay import replay_command
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.manager import ResumePoint
from megatron_async.scheduler import events as ev
from megatron_async.scheduler import record
from megatron_async.scheduler.record import Raised, read_record, record_files
from megatron_async.scheduler.scheduler import Scheduler
from tests.rollout.stand_ins import Engines, manager_of, settings
from tests.rollout.test_manager import Trainer


class Defective(Scheduler):
    """Does not know that batches are taken."""

    def step(self, event: ev.Event) -> list[ev.Action]:
        if isinstance(event, ev.BatchTaken):
            raise LookupError("a defect of the scheduler")
        return super().step(event)


async def test_the_event_that_makes_the_scheduler_raise_is_in_the_record_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tmp_path, settings("async"))

    await trainer.manager.start()
    await trainer.manager.attach(ResumePoint(0))
    trainer.manager._driver._scheduler.__class__ = Defective
    await trainer.publish(0, 0)
    with pytest.raises(LookupError):
        await trainer.batch()
    # the process may die now: nothing was closed or flushed yet
    last = list(read_record(tmp_path / "events" / "0.jsonl")[1])[-1]
    await trainer.manager.stop()
    assert isinstance(last.event, ev.BatchTaken)
    assert last.actions == (Raised("LookupError('a defect of the scheduler')"),)
    # today's scheduler has no such defect: the replay names the event at which there was one
    with pytest.raises(ComponentFailure, match=r"BatchTaken.*was the exception LookupError"):
        replay_command(tmp_path, None, timeline=True)
    assert (
        "the scheduler raised LookupError('a defect of the scheduler')" in capsys.readouterr().out
    )


async def test_a_long_run_keeps_the_newest_steps_and_replays_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step a file here; four files are kept beside the one that is written."""
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


async def test_a_resume_reports_all_recovered_groups_before_anything_follows(
    tmp_path: Path,
) -> None:
    """One after the other, a batch would be emitted while an older group is not known yet."""
    config = settings("async")

    trainer = await Trainer(tmp_path, config).started()
    await trainer.batch()
    await trainer.publish(0, 1)
    position = (await trainer.manager.position(0))["store_position"]
    await trainer.manager.checkpoint_finalised(0, 1, [1])
    await trainer.batch()
    await trainer.manager.stop()
    trainer = Trainer(tmp_path, config)
    await trainer.manager.start()
    await trainer.begin(ResumePoint(1, 1, parent=0, store_position=position))
    await trainer.manager.stop()
    events = [exchange.event for exchange in read_record(tmp_path / "events" / "1.jsonl")[1]]
    (found,) = [event for event in events if isinstance(event, ev.Recovered)]
    assert events[0] == found and len(found.groups) > 1


async def test_requests_that_end_early_in_one_turn_are_one_event(tmp_path: Path) -> None:
    """It comes before all that may follow from their end, and after it none of them is heard of."""
    manager, seen = manager_of(tmp_path, settings("copris"), Engines()), list[ev.Event]()

    await manager.start()
    await manager.attach(ResumePoint(0))
    driver = manager._driver
    driver._step = lambda event: seen.append(event)  # type: ignore[method-assign]
    others = (ev.LeftQueue(3, 0.5), ev.TokensArrived(3, 5, 0))
    for event in (ev.Aborted(1), *others, ev.Aborted(2), ev.EngineDown("a")):
        driver._feed(event)
    driver._feed(ev.Aborted(4))
    await asyncio.sleep(0)
    await manager.stop()
    assert seen == [
        ev.LeftQueue(3, 0.5),
        ev.TokensArrived(3, 5, 0),
        ev.ManyAborted(((1,), (2,))),
        ev.EngineDown("a"),
        ev.Aborted(4),
    ]


async def test_what_has_ended_early_is_reported_before_its_engine_is_lost(tmp_path: Path) -> None:
    """Else the scheduler would submit to an engine that is not there any more."""
    manager, seen = manager_of(tmp_path, settings("copris"), Engines()), list[object]()

    await manager.start()
    await manager.attach(ResumePoint(0))
    driver = manager._driver
    engine_id = next(iter(driver._slots))
    driver._slots[engine_id].up = True
    driver._step = lambda event: seen.append((event, engine_id in driver._slots))  # type: ignore[method-assign]
    driver._feed(ev.Aborted(1))
    driver.engine_failed(engine_id, "a test")
    await manager.stop()
    assert seen == [(ev.Aborted(1), True), (ev.EngineDown(engine_id), False)]
