"""How many scorers run: a pure function of the queue, the time of a score and the clock."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_async.scoring.count import (
    DRAIN_SECONDS,
    REST_SECONDS,
    ScorerCount,
    queued,
    scored,
)


def at(most: int, seconds: float, count: int = 1) -> ScorerCount:
    return ScorerCount(most, count=count, seconds=seconds)


def test_a_queue_that_one_scorer_works_off_in_time_asks_for_no_more() -> None:
    assert queued(at(8, 0.001), 100, 0.0).count == 1


def test_a_longer_queue_asks_for_as_many_as_work_it_off_in_time() -> None:
    assert queued(at(64, DRAIN_SECONDS / 10), 200, 0.0).count == 20


def test_what_a_burst_asked_for_is_kept_for_a_while_and_then_given_up() -> None:
    state = queued(at(8, 1.0), 8, 1.0)
    for second in range(2, int(REST_SECONDS)):
        state = queued(state, 0, float(second))
        assert state.count == 8
    state = queued(state, 0, REST_SECONDS)  # the burst was within the span that ends here
    assert state.count == 8
    assert queued(state, 2, 2 * REST_SECONDS).count == 2


def test_the_time_of_a_score_is_a_mean_that_forgets() -> None:
    state = ScorerCount(8)
    for seconds in [1.0] + [0.1] * 60:
        state = scored(state, seconds)
    assert 0.1 < state.seconds < 0.11


@given(
    st.integers(1, 16),
    st.lists(st.tuples(st.integers(0, 2000), st.floats(0, 5), st.floats(0, 30)), max_size=50),
)
def test_the_number_stays_within_one_and_the_limit(
    most: int, moments: list[tuple[int, float, float]]
) -> None:
    state, now = ScorerCount(most), 0.0
    for waiting, seconds, later in moments:
        now += later
        state = queued(scored(state, seconds), waiting, now)
        assert 1 <= state.count <= most
