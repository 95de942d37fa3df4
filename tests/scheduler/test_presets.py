"""Tests of each preset by examples (B = 2 groups of N = 2 trajectories, N' = 6, one engine).

Also tests of the staleness bound: batch n has no token older than version max(0, n - k). In these,
group 0 is a straggler, which runs while others complete, with preset `async` and k = 1.
"""

from __future__ import annotations

import pytest

from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason
from tests.scheduler.script import Script


class TestCopris:
    def test_batch_aborts_running_requests_and_keeps_them_partial(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.tokens(20, 21)
        run.finish(0, 1)
        run.finish(10, 11)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(0, (0, 1))]
        assert [a.trajectory_id for a in run.of(ev.Abort)] == [20, 21]
        run.abort_acknowledged()
        view = run.scheduler.view()
        assert (view.buffered_partial, view.in_flight) == (2, 0)

    def test_update_waits_for_aborts_and_partial_trajectories_resume_first(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.tokens(20, 21)
        run.finish(0, 1, 10, 11)
        assert run.send(ev.UpdateRequested(1)) == []
        run.send(ev.Aborted(20))
        assert not run.of(ev.AllowUpdate)
        run.send(ev.Aborted(21))
        assert run.emitted == [ev.AllowUpdate(1)]
        run.prompts(1)  # The group was requested before the update; it waits as well.
        run.publish(1)
        assert run.emitted == [
            ev.Submit(20, "a", True),
            ev.Submit(21, "a", True),
            ev.Submit(30, "a", False),
            ev.Submit(31, "a", False),
            ev.RequestPrompts(1),
        ]


class TestSync:
    def test_sync_starts_one_batch_and_emits_it_when_all_are_scored(self) -> None:
        run = Script("sync")
        assert run.emitted == [ev.RequestPrompts(2)]
        run.prompts(2)
        assert run.submitted() == [0, 1, 10, 11]
        assert run.finish(0, 1, 10)[-1] == ev.Score(10)
        run.tokens(11)
        assert run.send(ev.Finished(11)) == [ev.Score(11)]
        assert run.send(ev.RewardReady(11, 1.0)) == [ev.EmitBatch(0, (0, 1))]
        assert run.send(ev.UpdateRequested(1)) == [ev.AllowUpdate(1)]
        assert run.publish(1) == [ev.RequestPrompts(2)]


class TestPipeline:
    def test_generation_continues_during_training(self) -> None:
        run = Script("pipeline")
        run.prompts(3)
        emitted = run.finish(0, 1, 10, 11)
        assert ev.EmitBatch(0, (0, 1)) in emitted
        assert not run.of(ev.Abort)
        assert run.scheduler.view().in_flight == 2
        run.prompts(2)
        assert run.scheduler.view().in_flight == 6

    def test_update_pauses_engines_and_keeps_running_requests(self) -> None:
        run = Script("pipeline", kv="keep")
        run.prompts(3)
        run.finish(0, 1, 10, 11)
        run.prompts(2)
        run.send(ev.BatchTaken(0))
        assert run.send(ev.UpdateRequested(1)) == [ev.PauseEngines("in_place"), ev.AllowUpdate(1)]
        # The end is reported late; the free slot is filled afterward.
        assert run.finish(20) == [ev.Score(20)]
        emitted = run.publish(1)
        assert emitted[0] == ev.ResumeEngines()

    def test_boundary_pause_pauses_engines_from_the_batch_to_the_publication(self) -> None:
        run = Script("pipeline", kv="keep", boundary="pause", overlap=False)
        run.prompts(3)
        emitted = run.finish(0, 1, 10, 11)
        assert emitted[-2:] == [ev.EmitBatch(0, (0, 1)), ev.PauseEngines("in_place")]
        assert not run.of(ev.Abort) and run.scheduler.view().in_flight == 2
        assert run.send(ev.BatchTaken(0)) == []
        assert run.send(ev.UpdateRequested(1)) == [ev.AllowUpdate(1)]
        assert run.publish(1)[0] == ev.ResumeEngines()
        assert not run.of(ev.PauseEngines)

    def test_drop_oldest_drops_the_oldest_group_when_too_many_wait(self) -> None:
        run = Script("pipeline", max_waiting_batches=1, overflow="drop_oldest")
        run.prompts(3)
        run.finish(0, 1, 10, 11)  # These groups are batch 0, which the trainer has not received.
        run.prompts(2)
        run.finish(20, 21)
        assert not run.of(ev.Drop)
        run.finish(30, 31)
        assert run.of(ev.Drop) == [
            ev.Drop(20, DropReason.OVERFLOW),
            ev.Drop(21, DropReason.OVERFLOW),
        ]


class TestAsync:
    def test_async_level_one_generates_one_batch_during_training(self) -> None:
        run = Script("async", concurrency=4, max_async_level=1)
        run.prompts(2)
        run.finish(0, 1, 10, 11)
        assert run.scheduler.view().in_flight == 0
        run.prompts(2)
        assert run.submitted() == [20, 21, 30, 31]
        run.send(ev.BatchTaken(0))
        run.finish(20, 21, 30, 31)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (2, 3))]


class TestBackPressure:
    """Tests that groups which wait for a score, a batch or the trainer prevent new groups."""

    def test_restarted_members_do_not_count_as_finished(self) -> None:
        run = Script(
            "async", groups_per_batch=1, oversample=2, max_async_level=0, on_stale="restart"
        )
        run.prompts(2)
        run.tokens(0, 1, 10, 11)
        run.send(*(ev.Finished(t) for t in (0, 1, 10, 11)), ev.RewardReady(0, 0.0))
        assert run.scheduler.view().finished_groups == 2
        run.send(ev.RewardReady(10, 0.0), ev.RewardReady(11, 1.0))
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(0, (1,))]
        assert run.of(ev.Restart) == [ev.Restart(0)], "1 is with the scorer"
        assert run.scheduler.view().finished_groups == 0
        run.send(ev.RewardReady(1, 1.0))
        assert run.of(ev.Restart) == [ev.Restart(1)]
        assert run.scheduler.view().finished_groups == 0


def overtaken(on_stale: str, *, steps: int = 2) -> Script:
    """Return a run in which group 0 has only tokens of version 0, and batches 0 to steps - 1
    lack it."""
    run = Script("async", max_async_level=1, on_stale=on_stale, groups_per_batch=1, concurrency=4)
    run.prompts(2)
    run.tokens(0, 1)
    for step in range(steps):
        group = 10 * (step + 1)
        if step:
            run.prompts(1)
        run.finish(group, group + 1)
        if step + 1 < steps:
            run.send(ev.BatchTaken(step), ev.UpdateRequested(step + 1))
            run.publish(step + 1)
    return run


def test_on_stale_drop_drops_a_stale_group_and_counts_it() -> None:
    run = overtaken("drop")
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (2,))]
    assert run.of(ev.Abort) == [ev.Abort(0, "a"), ev.Abort(1, "a")]
    run.abort_acknowledged()
    assert run.of(ev.Drop) == [ev.Drop(0, DropReason.STALE), ev.Drop(1, DropReason.STALE)]
    assert run.scheduler.view().wasted_tokens == 10


def test_on_stale_wait_delays_the_batch_for_a_stale_group() -> None:
    run = overtaken("wait")
    assert not run.of(ev.EmitBatch)  # Batch 1 would leave group 0 behind.
    run.send(ev.Finished(0), ev.Finished(1), ev.RewardReady(0, 1.0), ev.RewardReady(1, 0.0))
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (0,))]


@pytest.mark.parametrize(("k", "groups"), [(0, 2), (1, 4), (2, 6), (5, 12)])
def test_lag_capacity_counts_running_partial_and_scored_groups(k: int, groups: int) -> None:
    run = Script("async", max_async_level=k, concurrency=100)
    assert run.emitted == [ev.RequestPrompts(groups)]
    run.prompts(groups)
    run.finish(0, 1)
    run.send(ev.Aborted(10))
    assert not run.of(ev.RequestPrompts)
    assert run.scheduler.view().open_groups == groups


def test_aborted_request_without_tokens_gets_the_version_of_its_next_start() -> None:
    run = Script("copris", max_async_level=1, on_stale="drop", concurrency=4, groups_per_batch=1)
    run.prompts(2)
    run.finish(0, 1)
    run.abort_acknowledged()  # Requests 10 and 11 were queued in the engine.
    run.send(ev.UpdateRequested(1))
    run.publish(1)
    assert run.submitted() == [10, 11]
    run.prompts(1)
    run.finish(20, 21)
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (2,))]
    run.abort_acknowledged()
    assert not run.of(ev.Drop)
    run.send(ev.UpdateRequested(2))
    run.publish(2)
    assert run.submitted() == [10, 11]


class TestWaitsForTrainer:
    """Tests of `Scheduler.waits_for_trainer`, which metrics show as time."""

    def test_sync_waits_for_the_trainer_from_the_batch_until_the_update(self) -> None:
        run = Script("sync")
        run.prompts(2)
        run.finish(0, 1, 10)
        assert not run.scheduler.waits_for_trainer, "the slots are free, but a response is missing"
        run.finish(11)
        assert run.scheduler.waits_for_trainer
        run.send(ev.UpdateRequested(1))
        assert not run.scheduler.waits_for_trainer, "a weight update counts as a pause"
        run.publish(1)
        assert not run.scheduler.waits_for_trainer

    def test_pipeline_waits_for_the_trainer_only_under_back_pressure(self) -> None:
        run = Script("pipeline", max_waiting_batches=1)
        run.prompts(3)
        run.finish(0, 1, 10, 11)
        assert run.scheduler.waits_for_trainer, "the trainer has not taken its batch"
        run.send(ev.BatchTaken(0))
        assert not run.scheduler.waits_for_trainer
        run.prompts(3)
        run.finish(20, 21, 30, 31)
        assert run.scheduler.waits_for_trainer
        run.publish(1)
        assert run.scheduler.waits_for_trainer, "batch 1 waits for the trainer"
        run.send(ev.BatchTaken(1))
        assert not run.scheduler.waits_for_trainer

    def test_async_waits_for_the_trainer_when_open_groups_fill_the_bound(self) -> None:
        run = Script("async", max_async_level=1)
        run.prompts(3)
        run.finish(0, 1)
        assert not run.scheduler.waits_for_trainer, "no batch waits for training"
        run.finish(10, 11)
        run.prompts(1)
        run.finish(20, 21)
        assert run.scheduler.waits_for_trainer
        run.publish(1)
        assert not run.scheduler.waits_for_trainer
