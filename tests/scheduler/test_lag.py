"""The bound: no token older than version max(0, n - k) in batch n, and what becomes of stragglers.

One straggler (group 0) runs on while others complete, with k = 1 under `async`.
"""

from __future__ import annotations

import pytest

from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason
from tests.scheduler.script import Script


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


def test_restart_begins_again_from_the_prompt() -> None:
    run = overtaken("restart")
    run.send(ev.Aborted(0))
    assert run.emitted[0] == ev.Restart(0)
    run.send(ev.Finished(1))  # too late: its tokens are stale
    assert run.emitted[0] == ev.Restart(1)
    assert run.scheduler.view().restarted == 2


def test_wait_holds_the_batch_for_the_straggler() -> None:
    run = overtaken("wait")
    assert not run.of(ev.EmitBatch)  # batch 1 would leave group 0 behind
    run.send(ev.Finished(0), ev.Finished(1), ev.RewardReady(0, 1.0), ev.RewardReady(1, 0.0))
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (0,))]


def test_mask_trains_only_the_tokens_within_the_bound() -> None:
    run = overtaken("mask", steps=3)  # batches 0 to 2 are out, version 2 serves
    run.send(ev.BatchTaken(2))
    run.finish(0, 1)  # with tokens of version 2 besides those of version 0
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(3, (0,), mask_before=2)]


def test_mask_drops_a_group_that_has_no_token_left_to_train() -> None:
    run = overtaken("mask", steps=3)
    run.send(ev.BatchTaken(2))
    run.send(ev.Finished(0), ev.Finished(1), ev.RewardReady(0, 1.0), ev.RewardReady(1, 0.0))
    assert not run.of(ev.EmitBatch)
    assert run.of(ev.Drop) == [ev.Drop(0, DropReason.STALE), ev.Drop(1, DropReason.STALE)]


@pytest.mark.parametrize(("k", "groups"), [(0, 2), (1, 4), (2, 6), (5, 12)])
def test_capacity_counts_running_buffered_and_scored_groups(k: int, groups: int) -> None:
    run = Script("async", max_async_level=k, concurrency=100)
    assert run.emitted == [ev.RequestPrompts(groups)]
    run.prompts(groups)
    run.finish(0, 1)
    run.send(ev.Aborted(10))
    assert not run.of(ev.RequestPrompts)
    assert run.scheduler.view().open_groups == groups


def test_a_resumed_partial_keeps_the_version_of_its_oldest_token() -> None:
    run = Script("copris", max_async_level=1, on_stale="drop", concurrency=4, groups_per_batch=1)
    run.prompts(2)
    run.tokens(10)
    run.finish(0, 1)
    run.abort_acknowledged()
    run.send(ev.UpdateRequested(1))
    run.publish(1)
    assert run.submitted() == [10, 11]
    run.tokens(10, 11)
    run.send(ev.Aborted(10))  # by the engine
    run.prompts(1)
    run.finish(20, 21)
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(1, (2,))]
    dropped = [action.trajectory_id for action in run.of(ev.Abort) + run.of(ev.Drop)]
    assert sorted(dropped) == [10, 11]


def test_bound_holds_after_a_resume() -> None:
    """Six scored groups of version 5 come back at step 5: k = 1 leaves room for two batches."""
    run = Script("async", max_async_level=1, first_step=5, engines="", on_stale="drop")
    for _ in range(6):
        run.recovered("scored", oldest=5, reward=0.0)
    assert run.scheduler.view().next_step == 6
    run.up("a")
    assert not run.of(ev.RequestPrompts)
    run.send(ev.BatchTaken(5))
    assert run.of(ev.EmitBatch) == [ev.EmitBatch(6, (2, 3))]
    assert [a.reason for a in run.of(ev.Drop)] == [DropReason.STALE] * 4


def test_recovered_tokens_beyond_the_bound_never_start() -> None:
    run = Script("async", max_async_level=1, first_step=5, engines="", on_stale="restart")
    run.recovered("partial", oldest=3)
    assert run.of(ev.Restart) == [ev.Restart(0), ev.Restart(1)]
    run.up("a")
    assert run.of(ev.Submit)[0] == ev.Submit(0, "a", False)


def test_nothing_is_submitted_whose_tokens_would_be_stale_at_once() -> None:
    run = Script("async", max_async_level=0, on_stale="restart", groups_per_batch=1)
    run.prompts(1)
    run.send(ev.TokensArrived(0, 5, 0))
    run.send(ev.Finished(0), ev.RewardReady(0, 0.0))
    run.recovered("scored", oldest=0, reward=0.0)
    assert run.of(ev.EmitBatch)
    run.send(ev.Aborted(1))
    assert not run.of(ev.Submit)  # version 0 serves, but batch 1 takes version 1 only


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
