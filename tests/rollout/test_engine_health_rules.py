"""Tests whether a failure counts against an engine, a request or a prompt, including each row of
the table in docs/failures.md."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import hypothesis.strategies as st
import pytest
from hypothesis import given

from megatron_async.config.rollout import EngineConfig
from megatron_async.engines.interface import EngineClient, EngineError, EngineStatus
from megatron_async.rollout import monitor as monitors
from megatron_async.rollout.engine_health import EngineHealth, PromptFailures, too_many_refusals
from megatron_async.rollout.monitor import EngineMonitor
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.rollout.tracked_engine import TrackedEngine
from megatron_async.trajectory.types import PolicyVersion


def test_silence_continues_when_the_engine_aborts_a_request_by_itself() -> None:
    engine = EngineHealth()
    for second in (0.0, 10.0, 20.0):
        engine.request_started(second)
        engine.request_ended(second + 5.0, spontaneous=True)
    assert engine.silence(100.0) == 15.0
    engine.token(100.0)
    assert engine.silence(100.0) == 0.0


def test_missing_report_time_runs_until_a_load_report_is_readable() -> None:
    engine = EngineHealth()
    assert engine.unreported(500.0) == 0.0
    engine.queue(None, 500.0)
    engine.queue(None, 510.0)
    engine.suspend("update", 512.0)
    engine.release("update", 600.0)
    assert engine.unreported(603.0) == 15.0
    assert engine.request_clock(603.0) == 0.0, "the engine's queue is unknown"
    engine.queue(0, 603.0)
    assert engine.unreported(700.0) == 0.0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "token", "hold", "release", "store", "stored", "queue"]),
        st.integers(0, 20),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(EVENTS)
def test_silence_and_suspensions_equal_a_count_by_seconds(
    events: list[tuple[str, int, int]],
) -> None:
    """Two reasons suspend the engine independently. The release of a reason that does not suspend
    it changes nothing."""
    engine, now = EngineHealth(), 0
    requests, storing, queue_empty, silence, clock = 0, 0, False, 0, 0
    reasons: set[str] = set()
    released_at = float("-inf")
    for what, seconds, number in events:
        why = ("pause", "update")[number]
        if what == "begin":
            requests += 1
            engine.request_started(now)
        elif what == "end" and requests:
            requests -= 1
            engine.request_ended(now)
            silence = silence if requests else 0
        elif what == "token":
            silence = 0
            engine.token(now)
        elif what == "hold":
            reasons.add(why)
            engine.suspend(why, now)
        elif what == "release":
            if reasons == {why}:
                silence, released_at = 0, now
            reasons.discard(why)
            engine.release(why, now)
        elif what == "store":
            storing += 1
            engine.store_wait_started(now)
        elif what == "stored" and storing:
            storing -= 1
            engine.store_wait_ended(now)
        elif what == "queue":
            queue_empty = number == 0
            engine.queue(number, now)
        assert engine.suspended == bool(reasons)
        for since in (now, now - seconds, released_at + 1):
            assert engine.suspended_since(since) == (bool(reasons) or released_at >= since)
        now += seconds
        if requests > 0 and not reasons and not storing:
            silence += seconds
        if queue_empty and not reasons and not storing:
            clock += seconds
        assert (engine.silence(now), engine.request_clock(now)) == (silence, clock)


def test_count_of_engine_deaths_is_cleared_when_the_prompt_gets_a_token() -> None:
    """Eleven engines die on the prompt, and the sixth made tokens for it before it died."""
    prompts = PromptFailures()
    found = [prompts.engine_died({3}, tokens) for tokens in range(1, 6)]
    prompts.token(12, 3)
    found += [prompts.engine_died({3}, tokens) for tokens in range(6, 11)]
    assert found == [set()] * 10
    assert prompts.engine_died({3}, 11) == {3}


def test_request_failures_are_forgotten_when_the_engine_is_lost() -> None:
    prompts = PromptFailures()
    found = [prompts.failed(7) for _ in range(5)]
    prompts.engine_lost([7])
    assert [*found, *(prompts.failed(7) for _ in range(5))] == [False] * 10
    assert prompts.failed(7)


DOCS = Path(__file__).parents[2] / "docs" / "failures.md"


def working() -> EngineHealth:
    """Return the health of an engine with a request since second 0 and an empty queue."""
    engine = EngineHealth()
    engine.queue(0, 0.0)
    engine.request_started(0.0)
    return engine


TIMEOUT = 20.0


class Engine:
    """Engine that replies to each call for its version or load as the next element of `answers`
    says.

    Args:
        answers: True to reply, False to raise EngineError, None to never reply.
        paused: Whether a pause starts and ends during each call.
    """

    engine_id = "e"

    def __init__(self, answers: list[bool | None], *, paused: bool = False) -> None:
        self.answers, self.paused = answers, paused
        self.now = 0.0
        self.tracked = TrackedEngine(cast(EngineClient, self), lambda: self.now)
        self.tracked.up = True
        self.tracked.health.queue(0, 0.0)
        self.tracked.health.request_started(0.0)

    async def _answer(self) -> None:
        if self.paused:
            self.tracked.suspend("pause")
            self.tracked.release("pause")
        answer = self.answers.pop(0)
        if answer is None:
            await asyncio.Event().wait()
        if not answer:
            raise EngineError("e is dead")

    async def version(self) -> PolicyVersion:
        await self._answer()
        return PolicyVersion(0, 0)

    async def status(self) -> EngineStatus:
        await self._answer()
        return EngineStatus(1, 0, 0.5, 0)


def given_up(
    engine: Engine,
    act: Callable[[EngineMonitor, TrackedEngine], Awaitable[object]],
    timeout: float = TIMEOUT,
) -> bool:
    """Run `act` and return whether the monitor takes the engine out of service."""
    found: list[str] = []
    monitor = EngineMonitor(
        EngineConfig(hang_timeout_seconds=timeout),
        {"e": engine.tracked},
        RolloutStatistics(overlap=True),
        lambda _: None,
        lambda engine_id, _: found.append(engine_id),
    )

    async def body() -> None:
        await act(monitor, engine.tracked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitors, "_ASK_AGAIN_SECONDS", 0.0)
        asyncio.run(asyncio.wait_for(body(), 30))
    return found == ["e"]


def after_a_break(*answers: bool, paused: bool = False) -> bool:
    """Return whether an engine is removed after a broken stream, if it replies to the two version
    calls as in `answers`."""
    return given_up(
        Engine([*answers], paused=paused),
        lambda monitor, tracked: monitor.suspect(tracked, "it broke"),
    )


def without_report(*, paused: bool) -> bool:
    """Return whether an engine is removed if its load report never arrives."""
    return given_up(Engine([None], paused=paused), lambda monitor, _: monitor.poll(), 0.01)


def silent_for(seconds: float, *, reports: bool = True, released_at: float | None = None) -> bool:
    """Return whether an engine is removed if it makes no token, or sends no readable report, for
    `seconds`.

    Args:
        reports: Whether load reports are readable; otherwise the engine makes tokens but reports
            fail.
        released_at: Time at which a pause ends; None if there is no pause.
    """
    engine = Engine([True] if reports else [False, True, False, True])

    async def poll(monitor: EngineMonitor, tracked: TrackedEngine) -> None:
        if released_at is not None:
            tracked.suspend("pause")
            engine.now = released_at
            tracked.release("pause")
        if not reports:
            await monitor.poll()
            tracked.health.token(engine.now)
        engine.now = seconds
        if not reports:
            tracked.health.token(engine.now)
        await monitor.poll()

    return given_up(engine, poll)


def broken_by(*groups: int | None) -> bool:
    """Return whether an engine counts as broken after failed requests of these groups; None stands
    for a token."""
    engine, shown = working(), False
    for group in groups:
        if group is None:
            engine.token(1.0)
        else:
            shown = engine.failed(group)
    return shown


def own_fault(*tokens_between: bool) -> bool:
    """Return whether a request is at fault after one more failure than arguments; True stands for a
    token in between."""
    prompts = PromptFailures()
    shown = prompts.failed(7)
    for token in tokens_between:
        if token:
            prompts.token(7, 1)
        shown = prompts.failed(7)
    return shown


def ended_engines(*others_made_tokens: bool) -> bool:
    """Return whether group 1 is at fault after engines died one by one before its first token."""
    prompts, tokens, fatal = PromptFailures(), 0, set[int]()
    for made in others_made_tokens:
        tokens += made
        fatal = prompts.engine_died({1}, tokens)
    return fatal == {1}


def refused(groups: int, accepted_at: int = -1) -> bool:
    prompts, in_row = PromptFailures(), 0
    for group in range(groups):
        if group == accepted_at:
            prompts.token(99, 99)
        in_row = prompts.refused(group) or in_row
        assert prompts.refused(group) is None, "another request of the group was counted"
    return too_many_refusals(in_row)


# For each row of the table: evidence that suffices and evidence that just does not, or else the
# test that shows the rule.
ROWS: dict[str, tuple[Callable[[], bool], Callable[[], bool]] | str] = {
    "the engine's process has ended": (
        "engines/test_sglang_host.py::test_hosted_engine_is_reported_dead_and_leaves_no_process_when_killed"
    ),
    "a connection or stream breaks, and the engine does not reply to two calls": (
        lambda: after_a_break(False, False),
        lambda: (
            after_a_break(True)
            or after_a_break(False, True)
            or after_a_break(False, False, paused=True)
        ),
    ),
    "no load report arrives for `engines.hang_timeout_seconds`": (
        lambda: without_report(paused=False),
        lambda: without_report(paused=True),
    ),
    "every load report is unreadable for `engines.hang_timeout_seconds`": (
        lambda: silent_for(TIMEOUT + 0.1, reports=False),
        lambda: silent_for(TIMEOUT, reports=False),
    ),
    "the engine has requests but makes no token for `engines.hang_timeout_seconds`": (
        lambda: silent_for(TIMEOUT + 0.1) and silent_for(TIMEOUT + 9.1, released_at=9.0),
        lambda: silent_for(TIMEOUT) or silent_for(TIMEOUT + 9.0, released_at=9.0),
    ),
    "the engine replies, but requests of three prompts in a row fail": (
        lambda: broken_by(1, 1, 2, 3),
        lambda: broken_by(1, 2, None, 3, 3, 1),
    ),
    "a pause, a weight update or a checksum call fails": (
        "rollout/test_manager.py::"
        "test_late_error_of_a_replaced_engine_does_not_affect_the_new_engine"
    ),
    "the engine's checksum or log-probs are wrong twice": (
        "rollout/test_weight_checks.py::test_engine_is_replaced_when_it_fails_a_second_check"
    ),
    "the engine refuses a request": (lambda: refused(64), lambda: refused(127, accepted_at=64)),
    "a prompt is too long for the engines": (
        lambda: too_many_refusals(200, epoch=100),
        lambda: too_many_refusals(199, epoch=100),
    ),
    "one request fails six times in a row, but other requests succeed": (
        lambda: own_fault(*[False] * 5),
        lambda: own_fault(*[False] * 4, True),
    ),
    "six times, an engine (the same or different ones) dies while it runs a prompt": (
        lambda: ended_engines(*[True] * 6),
        lambda: ended_engines(*[True] * 5, False),
    ),
    "one response gets no token for 5 × `engines.hang_timeout_seconds`": (
        "rollout/test_generation.py::test_request_is_cut_off_and_its_engine_kept_when_it_is_silent"
    ),
    "an aborted request has not ended after ten periods of 2 s": (
        "rollout/test_generation.py::test_request_is_cut_off_and_its_engine_kept_when_an_abort_is_ignored"
    ),
    "the engine reports no parameters": (
        "weight_sync/test_transport_failures.py::"
        "test_connect_names_engine_that_reports_other_parameters_than_the_rest"
    ),
    "the engine generates nothing for `weights.timeout_seconds`": (
        "rollout/test_probe.py::test_sample_fails_when_the_engine_is_silent_or_has_another_version"
    ),
}


def test_table_in_the_docs_has_the_rows_of_the_test_table() -> None:
    section = DOCS.read_text().partition("## When an engine is taken out of service")[2]
    table = section.partition("| observation |")[2].partition("\n\n")[0]
    seen = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]
    assert len(seen) == len(ROWS)
    for row, known in zip(seen, ROWS, strict=True):
        assert row.startswith(known)


@pytest.mark.parametrize("row", ROWS)
def test_rule_applies_exactly_when_its_evidence_suffices(row: str) -> None:
    shown = ROWS[row]
    if isinstance(shown, str):
        path, _, name = shown.partition("::")
        assert f"def {name}(" in (DOCS.parents[1] / "tests" / path).read_text()
        return
    enough, nearly = shown
    assert enough() and not nearly()
