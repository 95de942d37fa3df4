"""What each preset does, example by example (B = 2 groups of N = 2, N' = 6, one engine).

And the bound: no token older than version max(0, n - k) in batch n, and what becomes of a straggler
(group 0), which runs on while others complete, with k = 1 under `async`.
"""

from __future__ import annotations

import pytest

from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason
from tests.scheduler.script import Script


class TestCopris:
    def test_terminates_early_when_b_groups_are_complete_and_keeps_the_rest(self) -> None:
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

    def test_update_waits_for_the_aborted_then_partial_ones_go_first(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.tokens(20, 21)
        run.finish(0, 1, 10, 11)
        assert run.send(ev.UpdateRequested(1)) == []
        run.send(ev.Aborted(20))
        assert not run.of(ev.AllowUpdate)
        run.send(ev.Aborted(21))
        assert run.emitted == [ev.AllowUpdate(1)]
        run.prompts(1)  # asked for before; it waits as well
        run.publish(1)
        assert run.emitted == [
            ev.Submit(20, "a", True),
            ev.Submit(21, "a", True),
            ev.Submit(30, "a", False),
            ev.Submit(31, "a", False),
            ev.RequestPrompts(1),
        ]


class TestSync:
    def test_starts_exactly_one_batch_and_emits_it_when_all_is_scored(self) -> None:
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
    def test_generation_goes_on_while_the_trainer_works(self) -> None:
        run = Script("pipeline")
        run.prompts(3)
        emitted = run.finish(0, 1, 10, 11)
        assert ev.EmitBatch(0, (0, 1)) in emitted
        assert not run.of(ev.Abort)
        assert run.scheduler.view().in_flight == 2
        run.prompts(2)
        assert run.scheduler.view().in_flight == 6

    def test_weights_change_in_flight(self) -> None:
        run = Script("pipeline", kv="keep")
        run.prompts(3)
        run.finish(0, 1, 10, 11)
        run.prompts(2)
        run.send(ev.BatchTaken(0))
        assert run.send(ev.UpdateRequested(1)) == [ev.PauseEngines("in_place"), ev.AllowUpdate(1)]
        assert run.finish(20) == [ev.Score(20)]  # reported late: its slot is filled afterwards
        emitted = run.publish(1)
        assert emitted[0] == ev.ResumeEngines()

    def test_a_full_ring_drops_the_oldest_group(self) -> None:
        run = Script("pipeline", max_waiting_batches=1, overflow="drop_oldest")
        run.prompts(3)
        run.finish(0, 1, 10, 11)  # batch 0, not taken
        run.prompts(2)
        run.finish(20, 21)
        assert not run.of(ev.Drop)
        run.finish(30, 31)
        assert run.of(ev.Drop) == [
            ev.Drop(20, DropReason.OVERFLOW),
            ev.Drop(21, DropReason.OVERFLOW),
        ]


class TestAsync:
    def test_level_one_generates_the_next_batch_while_the_trainer_works(self) -> None:
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
    """Finished groups that wait for a score, a batch or the trainer hold new groups back."""

    def test_members_that_start_again_are_not_finished(self) -> None:
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
    """Group 0 has tokens of version 0 only; batches 0 .. steps - 1 are emitted without it."""
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


def test_drop_ends_the_straggler_and_counts_it() -> None:
    run = overtaken("drop")
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (2,))]
    assert run.of(ev.Abort) == [ev.Abort(0, "a"), ev.Abort(1, "a")]
    run.abort_acknowledged()
    assert run.of(ev.Drop) == [ev.Drop(0, DropReason.STALE), ev.Drop(1, DropReason.STALE)]
    assert run.scheduler.view().wasted_tokens == 10


def test_wait_holds_the_batch_for_the_straggler() -> None:
    run = overtaken("wait")
    assert not run.of(ev.EmitBatch)  # batch 1 would leave group 0 behind
    run.send(ev.Finished(0), ev.Finished(1), ev.RewardReady(0, 1.0), ev.RewardReady(1, 0.0))
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (0,))]


@pytest.mark.parametrize(("k", "groups"), [(0, 2), (1, 4), (2, 6), (5, 12)])
def test_capacity_counts_running_buffered_and_scored_groups(k: int, groups: int) -> None:
    run = Script("async", max_async_level=k, concurrency=100)
    assert run.emitted == [ev.RequestPrompts(groups)]
    run.prompts(groups)
    run.finish(0, 1)
    run.send(ev.Aborted(10))
    assert not run.of(ev.RequestPrompts)
    assert run.scheduler.view().open_groups == groups


def test_a_request_that_wrote_nothing_takes_the_version_under_which_it_starts_again() -> None:
    run = Script("copris", max_async_level=1, on_stale="drop", concurrency=4, groups_per_batch=1)
    run.prompts(2)
    run.finish(0, 1)
    run.abort_acknowledged()  # 10 and 11 were queued in the engine
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
