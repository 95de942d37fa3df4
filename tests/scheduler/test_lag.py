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
