"""Tests of warnings about queues and engines, which are emitted once when their condition
begins."""

from __future__ import annotations

from megatron_async.scheduler import events as ev
from tests.scheduler.script import Script


def names(run: Script) -> list[str]:
    return [warning.name for warning in run.of(ev.Warn)]


def test_recomputation_storm_is_warned_after_three_bad_reports() -> None:
    run = Script("copris")
    run.prompts(3)
    bad, good = ev.EngineLoad("a", 1.0, 3), ev.EngineLoad("a", 1.0, 0)
    run.send(bad, bad, good, bad, bad)
    assert names(run) == []
    run.send(bad, bad, bad)
    assert names(run) == ["recomputation_storm"]
    assert "schedule.concurrency" in run.of(ev.Warn)[0].message
    run.send(good, bad, bad, bad)
    assert names(run) == ["recomputation_storm"]


def test_queue_underflow_is_warned_after_three_steps_without_batch() -> None:
    run = Script("pipeline", groups_per_batch=1, concurrency=2)
    seen = []
    for step in range(4):
        run.prompts(1)
        run.finish(10 * step, 10 * step + 1)
        run.send(ev.BatchTaken(step), ev.UpdateRequested(step + 1))
        run.publish(step + 1)
        seen += names(run)
    assert seen == ["queue_underflow"]


def test_queue_underflow_is_not_warned_without_overlap() -> None:
    run = Script("copris", groups_per_batch=1, concurrency=2)
    for step in range(4):
        run.prompts(1)
        run.finish(10 * step, 10 * step + 1)
        run.send(ev.BatchTaken(step), ev.UpdateRequested(step + 1))
        run.publish(step + 1)
        assert names(run) == []


def test_queue_overflow_is_warned_when_too_many_batches_wait() -> None:
    run = Script("pipeline", groups_per_batch=1, max_waiting_batches=1, overflow="drop_oldest")
    run.prompts(3)
    seen = []
    for _ in range(4):
        for _ in range(3):
            run.finish(*run.running[:2])
            if run.of(ev.RequestPrompts):
                run.prompts(1)
        run.send(ev.BatchTaken(run.scheduler.view().next_step - 1))
        seen += names(run)
    assert seen == ["queue_overflow"]


def finish_all(run: Script, waiting: list[int]) -> None:
    """Finish running requests and those that replace them, until no new group may start."""
    while run.running:
        done = list(run.running)
        run.send(*(ev.Finished(t) for t in done))
        waiting += done
        if run.of(ev.RequestPrompts):
            run.prompts(2)


def test_scoring_backlog_is_warned_once() -> None:
    run = Script("copris", groups_per_batch=1, concurrency=4)
    run.prompts(2)
    waiting: list[int] = []
    seen = []
    for step in range(8):
        finish_all(run, waiting)
        for _ in range(2):
            t = waiting.pop(0)
            run.send(ev.RewardReady(t, float(t % 10)))
        run.send(ev.BatchTaken(step))
        seen += [(step, name) for name in names(run)]
        run.send(ev.UpdateRequested(step + 1))
        run.publish(step + 1)
    assert seen == [(2, "scoring_backlog")]


def test_scoring_backlog_is_not_warned_when_scores_keep_up() -> None:
    run = Script("copris", groups_per_batch=1, concurrency=4)
    run.prompts(2)
    for step in range(8):
        run.finish(*run.running[:2])
        run.abort_acknowledged()
        run.send(ev.BatchTaken(step))
        assert names(run) == []
        run.send(ev.UpdateRequested(step + 1))
        run.publish(step + 1)
        if run.of(ev.RequestPrompts):
            run.prompts(1)
