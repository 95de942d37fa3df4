"""What each preset does, example by example (B = 2 groups of N = 2, N' = 6, one engine)."""

from __future__ import annotations

from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason
from tests.scheduler.script import Script


class TestCopris:
    def test_fills_all_slots_and_asks_for_no_more_prompts_than_they_take(self) -> None:
        run = Script("copris")
        assert run.emitted == [ev.RequestPrompts(3)]
        run.prompts(3)
        assert run.submitted() == [0, 1, 10, 11, 20, 21]
        assert not run.of(ev.RequestPrompts)

    def test_replaces_each_completion_at_once(self) -> None:
        run = Script("copris")
        run.prompts(3)
        assert run.send(ev.Finished(1)) == [ev.Score(1), ev.RequestPrompts(1)]
        run.prompts(1)
        assert run.submitted() == [30]

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

    def test_nothing_starts_while_the_trainer_works(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.finish(0, 1, 10, 11)
        run.abort_acknowledged()
        assert run.prompts(1) == []
        assert run.send(ev.BatchTaken(0)) == []

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

    def test_a_trajectory_that_finishes_although_aborted_is_kept_and_scored(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.tokens(20)
        run.finish(0, 1, 10, 11)
        assert run.send(ev.Finished(20)) == [ev.Score(20)]
        run.send(ev.Aborted(21), ev.RewardReady(20, 1.0), ev.UpdateRequested(1))
        run.publish(1)
        assert run.submitted() == [21]

    def test_a_request_that_is_queued_in_the_engine_comes_back_without_tokens(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.tokens(21)
        run.finish(0, 1, 10, 11)
        run.abort_acknowledged()
        run.send(ev.UpdateRequested(1))
        run.publish(1)
        assert run.of(ev.Submit) == [ev.Submit(21, "a", True), ev.Submit(20, "a", False)]


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

    def test_dynamic_sampling_replaces_groups_without_variance(self) -> None:
        run = Script("sync", dynamic_sampling=True)
        run.prompts(2)
        run.tokens(0, 1)
        run.send(ev.Finished(0), ev.Finished(1), ev.RewardReady(0, 1.0), ev.RewardReady(1, 1.0))
        assert run.of(ev.Drop) == [
            ev.Drop(0, DropReason.FILTERED),
            ev.Drop(1, DropReason.FILTERED),
        ]
        assert run.of(ev.RequestPrompts) == [ev.RequestPrompts(1)]
        view = run.scheduler.view()
        assert (view.filtered_tokens, view.dropped) == (10, {DropReason.FILTERED: 2})

    def test_oversampling_keeps_the_first_b_and_drops_what_cannot_be_on_policy(self) -> None:
        run = Script("sync", oversample=1.5, boundary="abort")
        assert run.emitted == [ev.RequestPrompts(3)]
        run.prompts(3)
        run.tokens(0)
        run.finish(10, 11, 20, 21)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(0, (1, 2))]
        assert run.of(ev.Drop) == []  # they still run: aborted first
        run.send(ev.Aborted(0), ev.Aborted(1))
        assert [a.trajectory_id for a in run.of(ev.Drop)] == [0, 1]


class TestRapid:
    def test_one_inference_batch_of_h_minibatches_then_a_stop(self) -> None:
        run = Script("rapid", groups_per_batch=8, updates_per_batch=4, concurrency=100)
        assert run.emitted == [ev.RequestPrompts(8)]
        run.prompts(8)
        for group in range(8):
            run.finish(10 * group, 10 * group + 1)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(0, tuple(range(8)))]
        assert not run.of(ev.RequestPrompts)


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

    def test_recompute_retracts(self) -> None:
        run = Script("pipeline", kv="recompute")
        assert run.send(ev.UpdateRequested(1))[0] == ev.PauseEngines("retract")

    def test_a_full_ring_blocks_new_groups_only(self) -> None:
        run = Script("pipeline", ring_batches=1)
        run.prompts(3)
        run.finish(0, 1, 10, 11)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(0, (0, 1))]
        assert run.prompts(2) == []
        assert run.send(ev.Aborted(20)) == [ev.Submit(20, "a", False)]
        run.send(ev.BatchTaken(0))
        assert run.submitted() == [30, 31, 40, 41]

    def test_a_full_ring_drops_the_oldest_group(self) -> None:
        run = Script("pipeline", ring_batches=1, overflow="drop_oldest")
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
    def test_at_most_k_plus_one_batches_are_under_way(self) -> None:
        run = Script("async", concurrency=100, max_async_level=2)
        assert run.emitted == [ev.RequestPrompts(6)]

    def test_level_zero_is_on_policy(self) -> None:
        run = Script("async", concurrency=100, max_async_level=0)
        run.prompts(2)
        run.finish(0, 1, 10, 11)
        assert run.of(ev.EmitBatch)
        assert not run.of(ev.RequestPrompts)
        run.send(ev.BatchTaken(0), ev.UpdateRequested(1))
        assert ev.RequestPrompts(2) in run.publish(1)

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

    def test_two_batches_of_finished_groups_hold_new_ones_back_also_under_copris(self) -> None:
        run = Script("copris", concurrency=8)
        run.prompts(4)
        run.send(*(ev.Finished(t) for t in (0, 1, 10, 11, 20, 21, 30)))
        assert len(run.of(ev.RequestPrompts)) == 1  # three groups are finished
        assert run.prompts(3, prompt_tokens=9) and len(run.submitted()) == 6
        run.send(ev.Finished(31))
        assert run.emitted == [ev.Score(31)], "four groups are two batches"
        view = run.scheduler.view()
        assert (view.finished_groups, view.unscored, view.in_flight) == (4, 8, 6)

    def test_what_was_begun_goes_on(self) -> None:
        run = Script("copris", groups_per_batch=1, concurrency=3)
        run.prompts(3)
        assert run.submitted() == [0, 1, 10]
        run.send(ev.Finished(0), ev.Finished(1), ev.Finished(10))
        assert run.submitted() == [11, 20, 21], "the ring takes two; one is finished"
        run.send(ev.Aborted(11))
        assert run.submitted() == [11]
        assert run.send(ev.Finished(11)) == [ev.Score(11)]
        assert run.send(ev.Aborted(20)) == [ev.Submit(20, "a", False)]

    def test_a_batch_lets_new_groups_start_again(self) -> None:
        run = Script("copris", groups_per_batch=1, concurrency=4)
        run.prompts(2)
        run.send(*(ev.Finished(t) for t in (0, 1, 10, 11)))
        run.prompts(2)
        assert run.submitted() == []
        run.send(ev.RewardReady(0, 0.0), ev.RewardReady(1, 1.0))
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(0, (0,))]
        run.send(ev.BatchTaken(0), ev.UpdateRequested(1))
        run.publish(1)
        assert run.submitted() == [20, 21, 30, 31]

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
