"""Tests of engines: balance, prefix affinity, loss and versions; and of the end of the task."""

from __future__ import annotations

import pytest

from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import PolicyVersion
from tests.scheduler.script import Script


def placed(run: Script) -> dict[int, str]:
    return {a.trajectory_id: a.engine_id for a in run.of(ev.Submit)}


def test_placement_keeps_groups_together_and_spreads_them() -> None:
    run = Script("copris", engines="ab", concurrency=8)
    run.prompts(4)
    engines = placed(run)
    for first in (0, 10, 20, 30):
        assert engines[first] == engines[first + 1]
    assert sorted(engines.values()) == ["a"] * 4 + ["b"] * 4


def test_placement_leaves_the_groups_engine_when_it_is_overloaded() -> None:
    """A resumed member leaves the engine of its group if that engine has far more tokens."""
    run = Script("copris", engines="ab", concurrency=4)
    run.prompts(2)  # Group 0 runs on engine a, group 1 on engine b.
    run.tokens(1, count=500)
    assert run.send(ev.Aborted(0)) == [ev.Submit(0, "b", False)]


def test_placement_limits_affinity_to_an_engines_share_of_requests() -> None:
    run = Script("copris", engines="ab", concurrency=4, group_size=4)
    run.prompts(1, prompt_tokens=1000)
    assert list(placed(run).values()) == ["a", "a", "b", "b"]


def test_requests_are_partial_when_their_engine_comes_up_again() -> None:
    run = Script("copris")
    run.prompts(3)
    run.tokens(0)
    run.up("a")
    assert run.of(ev.Submit)[0] == ev.Submit(0, "a", True)
    assert run.scheduler.view().in_flight == 6


def test_engine_of_another_lineage_gets_no_request() -> None:
    run = Script("copris", engines="", first_step=3)
    assert run.send(ev.EngineUp("a", PolicyVersion(1, 3), 10_000)) == []


def test_late_reports_of_a_lost_engine_change_nothing() -> None:
    run = Script("copris")
    run.prompts(3)
    run.send(ev.EngineDown("a"))
    assert run.send(ev.Aborted(0)) == []
    run.send(ev.TokensArrived(0, 9, 0))
    assert run.send(ev.Finished(1)) == [ev.Score(1)]
    run.up("a")
    assert run.of(ev.Submit)[0] == ev.Submit(0, "a", True)
    assert 1 not in run.submitted()


def test_add_group_raises_for_an_existing_trajectory() -> None:
    run = Script("copris")
    spec = run.spec()
    run.send(ev.PromptsAvailable((spec,)))
    with pytest.raises(ValueError, match="trajectory 0 exists already"):
        run.send(ev.PromptsAvailable((spec,)))


def test_last_batch_has_at_least_one_group_per_minibatch() -> None:
    run = Script("copris", updates_per_batch=2)
    run.prompts(1)
    run.send(ev.PromptsAvailable(()))
    run.finish(0, 1)
    assert not run.of(ev.EmitBatch)
    assert run.scheduler.finished
