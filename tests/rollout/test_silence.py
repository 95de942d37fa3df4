"""Which silence counts: an engine's with work and no hold, a request's where there is no queue."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from megatron_async.rollout.engine_slot import EngineWatch


def test_an_idle_engine_is_not_silent_when_it_gets_work() -> None:
    watch = EngineWatch()
    assert watch.silence(500.0) == 0.0
    watch.request_began(500.0)
    assert watch.silence(503.0) == 3.0


def test_a_token_begins_the_silence_anew() -> None:
    watch = EngineWatch()
    watch.request_began(0.0)
    watch.request_began(4.0)
    watch.token(5.0)
    assert watch.silence(7.0) == 2.0


def test_the_end_of_the_last_request_ends_it() -> None:
    watch = EngineWatch()
    watch.request_began(0.0)
    watch.request_ended(90.0)
    assert watch.silence(100.0) == 0.0
    watch.request_began(100.0)
    assert watch.silence(101.0) == 1.0


def test_a_held_engine_is_not_silent_and_starts_anew_when_all_who_hold_it_are_done() -> None:
    watch = EngineWatch()
    watch.request_began(0.0)
    watch.hold("pause", 10.0)
    watch.hold("update", 11.0)
    assert watch.held and watch.silence(700.0) == 10.0
    watch.release("update", 700.0)
    assert watch.held and watch.silence(800.0) == 10.0
    watch.release("pause", 800.0)
    watch.release("pause", 900.0)  # nothing to release
    assert not watch.held and watch.silence(803.0) == 3.0


def test_no_silence_grows_while_tokens_wait_for_a_disk() -> None:
    watch = EngineWatch()
    watch.queue(0, 0.0)
    watch.request_began(0.0)
    watch.request_began(0.0)
    watch.store_begins(10.0)
    watch.store_begins(11.0)
    assert (watch.silence(400.0), watch.request_clock(400.0)) == (10.0, 10.0)
    watch.store_ends(400.0)
    assert (watch.silence(500.0), watch.request_clock(500.0)) == (10.0, 10.0)
    watch.store_ends(500.0)
    assert (watch.silence(503.0), watch.request_clock(503.0)) == (13.0, 13.0)


def test_what_was_asked_before_a_hold_or_in_it_is_no_evidence() -> None:
    watch = EngineWatch()
    assert not watch.held_since(0.0)
    watch.hold("update", 5.0)
    assert watch.held_since(4.0) and watch.held_since(6.0)
    watch.release("update", 9.0)
    assert watch.held_since(4.0) and not watch.held_since(9.5)


def test_the_clock_of_requests_stands_while_the_engine_is_held_or_has_a_queue() -> None:
    watch = EngineWatch()
    assert watch.request_clock(50.0) == 0.0, "what the queue is like is not known yet"
    watch.queue(0, 50.0)
    assert watch.request_clock(60.0) == 10.0
    watch.queue(3, 60.0)
    assert watch.request_clock(100.0) == 10.0
    watch.queue(0, 100.0)
    watch.hold("pause", 105.0)
    assert watch.request_clock(200.0) == 15.0
    watch.release("pause", 200.0)
    assert watch.request_clock(201.0) == 16.0


HAPPENINGS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "token", "hold", "release", "busy", "free"]),
        st.integers(0, 20),
    ),
    max_size=40,
)


@given(HAPPENINGS)
def test_it_is_what_counting_second_by_second_gives(happenings: list[tuple[str, int]]) -> None:
    watch, now = EngineWatch(), 0
    requests, held, free, silence, clock = 0, False, False, 0, 0
    for what, seconds in happenings:
        if what == "begin":
            requests += 1
            watch.request_began(now)
        elif what == "end" and requests:
            requests -= 1
            watch.request_ended(now)
            silence = silence if requests else 0
        elif what == "token":
            silence = 0
            watch.token(now)
        elif what == "hold":
            held = True
            watch.hold("it", now)
        elif what == "release" and held:
            held, silence = False, 0
            watch.release("it", now)
        elif what in ("busy", "free"):
            free = what == "free"
            watch.queue(0 if free else 1, now)
        now += seconds
        silence += seconds * (requests > 0 and not held)
        clock += seconds * (free and not held)
        assert (watch.silence(now), watch.request_clock(now)) == (silence, clock)
