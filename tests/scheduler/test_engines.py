"""Engines: balance, prefix affinity, loss, versions; a known trajectory; the end of the source."""

from __future__ import annotations

import pytest

from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import PolicyVersion
from tests.scheduler.script import Script


def placed(run: Script) -> dict[int, str]:
    return {a.trajectory_id: a.engine_id for a in run.of(ev.Submit)}


def test_a_group_shares_an_engine_and_groups_spread() -> None:
    run = Script("copris", engines="ab", concurrency=8)
    run.prompts(4)
    engines = placed(run)
    for first in (0, 10, 20, 30):
        assert engines[first] == engines[first + 1]
    assert sorted(engines.values()) == ["a"] * 4 + ["b"] * 4


def test_affinity_yields_to_load() -> None:
    """A resumed member leaves the engine of its group when that carries far more tokens."""
    run = Script("copris", engines="ab", concurrency=4)
    run.prompts(2)  # group 0 on a, group 1 on b
    run.tokens(1, count=500)
    assert run.send(ev.Aborted(0)) == [ev.Submit(0, "b", False)]


def test_affinity_stops_at_an_engines_share_of_the_slots() -> None:
    run = Script("copris", engines="ab", concurrency=4, group_size=4)
    run.prompts(1, prompt_tokens=1000)
    assert list(placed(run).values()) == ["a", "a", "b", "b"]


def test_an_engine_that_comes_back_unannounced_has_lost_its_requests() -> None:
    run = Script("copris")
    run.prompts(3)
    run.tokens(0)
    run.up("a")
    assert run.of(ev.Submit)[0] == ev.Submit(0, "a", True)
    assert run.scheduler.view().in_flight == 6


def test_the_same_number_of_another_lineage_is_another_version() -> None:
    run = Script("copris", engines="", first_step=3)
    assert run.send(ev.EngineUp("a", PolicyVersion(1, 3), 10_000)) == []


def test_late_reports_of_a_lost_engine() -> None:
    run = Script("copris")
    run.prompts(3)
    run.send(ev.EngineDown("a"))
    assert run.send(ev.Aborted(0)) == []
    run.send(ev.TokensArrived(0, 9, 0))
    assert run.send(ev.Finished(1)) == [ev.Score(1)]
    run.up("a")
    assert run.of(ev.Submit)[0] == ev.Submit(0, "a", True)
    assert 1 not in run.submitted()


def test_a_trajectory_is_known_once() -> None:
    run = Script("copris")
    spec = run.spec()
    run.send(ev.PromptsAvailable((spec,)))
    with pytest.raises(ValueError, match="trajectory 0 is known already"):
        run.send(ev.PromptsAvailable((spec,)))


def test_a_last_batch_has_at_least_one_group_for_each_minibatch() -> None:
    run = Script("copris", updates_per_batch=2)
    run.prompts(1)
    run.send(ev.PromptsAvailable(()))
    run.finish(0, 1)
    assert not run.of(ev.EmitBatch)
    assert run.scheduler.finished
