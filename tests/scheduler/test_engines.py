"""Engines: balance, prefix affinity, limits, loss, versions; priorities; the end of the source."""

from __future__ import annotations

import pytest

from megatron_async.scheduler import events as ev
from megatron_async.trajectory.types import DropReason, PolicyVersion
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


def test_an_engine_never_runs_more_than_its_own_limit() -> None:
    run = Script("copris", engines="", concurrency=6)
    run.up("a", max_running=1)
    run.up("b", max_running=2)
    run.prompts(3)
    assert sorted(placed(run).values()) == ["a", "b", "b"]
    assert not run.of(ev.RequestPrompts)


def test_what_ran_on_a_lost_engine_goes_on_elsewhere_from_its_tokens() -> None:
    run = Script("copris", engines="ab", concurrency=4)
    run.prompts(2)
    run.tokens(0, 1)
    run.send(ev.EngineDown("a"))
    assert run.of(ev.Submit) == [ev.Submit(0, "b", True), ev.Submit(1, "b", True)]


def test_with_no_engine_left_everything_waits_for_the_next_one() -> None:
    run = Script("copris")
    run.prompts(3)
    run.tokens(0)
    assert run.send(ev.EngineDown("a")) == []
    assert run.scheduler.view().buffered_partial == 1
    run.up("b")
    assert run.submitted() == [0, 1, 10, 11, 20, 21]


def test_an_engine_that_comes_back_unannounced_has_lost_its_requests() -> None:
    run = Script("copris")
    run.prompts(3)
    run.tokens(0)
    run.up("a")
    assert run.of(ev.Submit)[0] == ev.Submit(0, "a", True)
    assert run.scheduler.view().in_flight == 6


def test_a_stale_engine_serves_nothing_until_it_holds_the_current_version() -> None:
    run = Script("copris", engines="", first_step=3)
    assert run.up("old", number=2) == []
    assert run.up("new", number=3) == [ev.RequestPrompts(3)]
    run.prompts(3)
    assert set(placed(run).values()) == {"new"}
    run.send(ev.EngineDown("old"))
    run.up("old", number=3)
    run.send(ev.EngineDown("new"))
    assert set(placed(run).values()) == {"old"}


def test_the_same_number_of_another_lineage_is_another_version() -> None:
    run = Script("copris", engines="", first_step=3)
    assert run.send(ev.EngineUp("a", PolicyVersion(1, 3), 10_000)) == []


def test_losing_the_last_running_request_lets_the_update_begin() -> None:
    run = Script("copris", engines="ab")
    run.prompts(3)
    run.finish(0, 1, 10, 11)
    run.send(ev.UpdateRequested(1))
    run.send(ev.EngineDown("a"), ev.EngineDown("b"))
    assert run.emitted == [ev.AllowUpdate(1)]


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


def test_higher_priority_groups_start_first() -> None:
    run = Script("copris", concurrency=2)
    run.scheduler.step(ev.EngineDown("a"))
    run.send(ev.PromptsAvailable((run.spec(), run.spec(priority=5))))
    run.up("a")
    assert run.submitted() == [10, 11]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("oldest_first", [0, 1, 10, 11]),
        ("newest_first", [11, 10, 1, 0]),
        ("longest_first", [10, 1, 0, 11]),
    ],
)
def test_buffer_order(order: str, expected: list[int]) -> None:
    run = Script("copris", concurrency=4, buffer_order=order)
    run.prompts(2)
    for trajectory_id, count in ((0, 5), (1, 6), (10, 9), (11, 4)):
        run.tokens(trajectory_id, count=count)
    run.send(ev.EngineDown("a"))
    run.up("a")
    assert run.submitted() == expected


class TestScorer:
    def test_a_failed_score_drops_the_whole_group(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.finish(0)
        run.send(ev.Finished(1), ev.RewardReady(1, None))
        drops = [ev.Drop(0, DropReason.SCORER), ev.Drop(1, DropReason.SCORER)]
        assert run.of(ev.Drop) == drops

    def test_a_running_sibling_is_aborted_first_and_dropped_when_it_ended(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.send(ev.Finished(1), ev.RewardReady(1, None))
        assert run.of(ev.Drop) == [ev.Drop(1, DropReason.SCORER)]
        assert run.of(ev.Abort) == [ev.Abort(0, "a")]
        assert run.send(ev.Finished(0))[0] == ev.Drop(0, DropReason.SCORER)

    def test_a_sibling_that_is_being_scored_is_dropped_once_it_is(self) -> None:
        run = Script("copris")
        run.prompts(3)
        run.send(ev.Finished(0), ev.Finished(1), ev.RewardReady(1, None))
        assert run.of(ev.Drop) == [ev.Drop(1, DropReason.SCORER)]
        assert run.send(ev.RewardReady(0, 1.0))[0] == ev.Drop(0, DropReason.SCORER)


class TestRecovery:
    def test_every_state_is_taken_up_where_it_was(self) -> None:
        run = Script("copris", engines="")
        run.recovered("partial")
        assert run.recovered("finished") == [ev.Score(10), ev.Score(11)]
        assert run.recovered("scored", reward=0.0) == []
        run.recovered("pending", tokens=0, oldest=None)
        run.up("a")
        assert run.of(ev.Submit) == [
            ev.Submit(0, "a", True),
            ev.Submit(1, "a", True),
            ev.Submit(30, "a", False),
            ev.Submit(31, "a", False),
        ]
        assert run.scheduler.view().complete_groups == 1

    def test_a_group_that_was_being_dropped_is_dropped_to_the_end(self) -> None:
        run = Script("copris", engines="")
        spec = run.spec()
        state = ev.TrajectoryState
        dropped = ev.RecoveredTrajectory(
            0, state.DROPPED, 4, 0, None, 0, drop_reason=DropReason.STALE
        )
        partial = ev.RecoveredTrajectory(1, state.PARTIAL, 4, 0, None, 0)
        emitted = run.send(ev.Recovered((ev.RecoveredGroup(spec, (dropped, partial)),)))
        assert emitted == [ev.Drop(1, DropReason.STALE)]

    def test_a_trajectory_is_known_once(self) -> None:
        run = Script("copris")
        spec = run.spec()
        run.send(ev.PromptsAvailable((spec,)))
        with pytest.raises(ValueError, match="trajectory 0 is known already"):
            run.send(ev.PromptsAvailable((spec,)))


class TestEndOfSource:
    def test_what_is_left_is_a_last_smaller_batch(self) -> None:
        run = Script("copris")
        run.prompts(1)
        run.send(ev.PromptsAvailable(()))
        assert not run.scheduler.finished
        run.finish(0, 1)
        assert run.of(ev.EmitBatch) == [ev.EmitBatch(0, (0,))]
        run.send(ev.BatchTaken(0))
        assert run.scheduler.finished

    def test_a_last_batch_has_at_least_one_group_for_each_minibatch(self) -> None:
        run = Script("copris", updates_per_batch=2)
        run.prompts(1)
        run.send(ev.PromptsAvailable(()))
        run.finish(0, 1)
        assert not run.of(ev.EmitBatch)
        assert run.scheduler.finished
