"""Tests the end of a response: it is never lost after the last token, and nothing is requested
after it.

Most tests have only `Generation` with a scripted engine; the last has a manager over the store of a
killed run.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.engines.interface import (
    EngineError,
    GenerationRequest,
    RequestRefused,
    TokenChunk,
)
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.rollout.background import BackgroundTasks
from megatron_async.rollout.engine_health import PromptFailures
from megatron_async.rollout.generation import Generation
from megatron_async.rollout.manager import ResumePoint
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.rollout.tracked_engine import TrackedEngine
from megatron_async.scheduler import events as ev
from megatron_async.store import buffers
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.types import (
    FinishReason,
    PolicyVersion,
    Prompt,
    Trajectory,
    TrajectoryState,
)
from tests.rollout.stand_ins import run, settings, trajectories_in
from tests.rollout.test_manager import Trainer


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the store write a chunk after each token."""
    monkeypatch.setattr(buffers, "CHUNK_TOKENS", 1)


STOP, LIMIT = 2, 6
V0 = PolicyVersion(0, 0)


def config_of(**changes: Any) -> RunConfig:
    base = {"sampling": {"max_new_tokens": LIMIT}}
    return build_config(merge(settings("sync").model_dump(), merge(base, changes)))


def chunk(*token_ids: int, end: Any = None) -> TokenChunk:
    tokens = np.array(token_ids, np.int32)
    return TokenChunk(tokens, np.full(len(tokens), -1.0, np.float32), V0, end)


@dataclass
class Scripted:
    """Engine that yields one scripted item after the other for every request."""

    script: list[TokenChunk | EngineError]
    engine_id: str = "scripted"
    requests: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.requests.append(request)
        for item in self.script:
            if isinstance(item, EngineError):
                raise item
            yield item

    async def abort(self, request_ids: list[str]) -> None:
        return None


def verified_engine(engine: Any, clock: Callable[[], float] = time.monotonic) -> TrackedEngine:
    """Return the tracked state of an engine that is verified for version `V0`."""
    tracked = TrackedEngine(engine, clock)
    tracked._accepted[V0] = None
    return tracked


@dataclass
class Bench:
    """`Generation` with one trajectory, whose prompt is (5, 0), and records of everything it
    reports."""

    store: TrajectoryStore
    generation: Generation
    tracked: TrackedEngine
    events: list[ev.Event]
    trajectory_id: int
    statistics: RolloutStatistics
    engine: Scripted
    suspected: list[str]
    given_up: list[str]
    refused: list[str]
    now: float = 0.0

    @classmethod
    def of(cls, folder: Path, config: RunConfig, *script: TokenChunk | EngineError) -> Bench:
        store = TrajectoryStore.open(folder / "store.sqlite", config.store)
        group = store.add_group(Prompt(np.array([5, 0], np.int32), "fixed"), 1)
        events: list[ev.Event] = []
        statistics = RolloutStatistics(overlap=config.schedule.overlap)
        suspected, given_up, refused = list[str](), list[str](), list[str]()

        class Seen:
            """Admission and monitor that record what is reported to them; the engine counts as
            alive."""

            failures = PromptFailures()

            def refused(self, _id: int, _group: int, why: str) -> None:
                refused.append(why)

            def give_up(self, _tracked: TrackedEngine, why: str) -> None:
                given_up.append(why)

            async def suspect(self, _tracked: TrackedEngine, why: str) -> None:
                suspected.append(why)

        seen: Any = Seen()
        background = BackgroundTasks(lambda: "a test")
        generation = Generation(
            config, store, statistics, (STOP,), seen, seen, background, events.append
        )
        engine = Scripted(list(script))
        tracked = verified_engine(engine)
        trajectory_id = group.trajectories[0].trajectory_id
        return cls(
            store, generation, tracked, events, trajectory_id, statistics, engine,
            suspected, given_up, refused,
        )  # fmt: skip

    async def one_request(self) -> Trajectory:
        """Run one request of the trajectory to its end and return the stored trajectory."""
        self.generation.submit(self.trajectory_id, self.tracked)
        await asyncio.sleep(0)  # The request starts during this await.
        (request,) = self.generation._requests.values()
        assert request.task is not None
        await asyncio.wait_for(asyncio.wait([request.task]), 10)
        if not request.task.cancelled() and (error := request.task.exception()) is not None:
            raise error  # Without this, the error would be lost.
        return self.store.load_trajectory(self.trajectory_id)

    @property
    def outcomes(self) -> list[ev.Event]:
        return [event for event in self.events if not isinstance(event, ev.TokensArrived)]


LOST = EngineError("scripted died")
ENDS = {
    "reported with the last token": ([chunk(7, STOP, end="stop")], FinishReason.STOP),
    "reported by itself": ([chunk(7), chunk(9), chunk(end="stop")], FinishReason.STOP),
    "a stop string, reported": ([chunk(7, 8, end="stop")], FinishReason.STOP),
    "lost after the stop token": ([chunk(7, STOP), LOST], FinishReason.STOP),
    "aborted at the stop token": ([chunk(7, STOP, end="abort")], FinishReason.STOP),
    "the limit, reported": ([chunk(*[7] * LIMIT, end="length")], FinishReason.LENGTH),
    "lost at the limit": ([chunk(*[7] * LIMIT), LOST], FinishReason.LENGTH),
    "aborted at the limit": ([chunk(*[7] * LIMIT, end="abort")], FinishReason.LENGTH),
    "lost before": ([chunk(7, STOP, 8), LOST], None),
    "aborted before": ([chunk(7), chunk(8, end="abort")], None),
    "aborted without a token": ([chunk(end="abort")], None),
}


async def test_queue_wait_is_reported_before_the_first_tokens(
    tmp_path: Path,
) -> None:
    first = replace(chunk(7), queued_seconds=0.5)
    bench = Bench.of(tmp_path, config_of(), first, chunk(STOP, end="stop"))
    await bench.one_request()
    i = bench.trajectory_id
    tokens = [ev.TokensArrived(i, 1, 0)] * 2
    assert bench.events == [ev.LeftQueue(i, 0.5), *tokens, ev.Finished(i)]
    await bench.store.close()


@pytest.mark.parametrize(("script", "reason"), ENDS.values(), ids=ENDS)
async def test_trajectory_is_finished_exactly_when_its_response_has_ended(
    tmp_path: Path, script: list[TokenChunk | EngineError], reason: FinishReason | None
) -> None:
    bench = Bench.of(tmp_path, config_of(), *script)
    stored = await bench.one_request()
    i = bench.trajectory_id
    if reason is None:
        assert (stored.state, bench.outcomes) == (TrajectoryState.PARTIAL, [ev.Aborted(i)])
    else:
        assert (stored.state, bench.outcomes) == (TrajectoryState.FINISHED, [ev.Finished(i)])
    assert stored.finish_reason is reason
    await bench.store.close()


async def test_response_reaches_its_forced_length_when_it_has_a_stop_token(tmp_path: Path) -> None:
    config = config_of(experiment={"forced_lengths": [4]})
    bench = Bench.of(tmp_path, config, chunk(7, STOP, end="abort"))
    assert (await bench.one_request()).state is TrajectoryState.PARTIAL
    stored = await bench.one_request()
    assert (stored.state, stored.finish_reason) == (TrajectoryState.FINISHED, FinishReason.LENGTH)
    assert [(r.max_new_tokens, r.ignore_eos) for r in bench.engine.requests] == [
        (4, True),
        (2, True),
    ]
    await bench.store.close()


@pytest.mark.parametrize("last", [chunk(7, STOP, end="stop"), chunk(7, 8, end="stop")])
async def test_last_tokens_and_their_end_are_stored_without_an_await_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: TokenChunk
) -> None:
    """This also holds if the tokens alone do not show the end: a kill or close at this point must
    leave both or neither."""
    bench = Bench.of(tmp_path, config_of(), last)
    committed, states = bench.store.sync, []

    async def noted() -> int:
        states.append(bench.store.load_trajectory(bench.trajectory_id).state)
        return await committed()

    monkeypatch.setattr(bench.store, "sync", noted)
    await bench.one_request()
    assert states == [TrajectoryState.FINISHED]
    await bench.store.close()


@pytest.mark.parametrize(
    "more", [chunk(9, end="stop"), chunk(9), LOST], ids=["end", "token", "error"]
)
async def test_old_stream_is_ignored_when_its_trajectory_runs_on_another_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: TokenChunk | EngineError
) -> None:
    """The lost engine had reported a complete response, and the trajectory was then restarted on
    another engine."""
    bench = Bench.of(tmp_path, config_of(), chunk(7, STOP, end="stop"), more)
    committed = bench.store.sync

    async def lost_and_restarted_meanwhile() -> int:
        monkeypatch.undo()
        bench.generation.detach_engine(bench.tracked, failed=True)
        bench.store.restart(bench.trajectory_id)
        bench.store.begin_request(bench.trajectory_id)
        return await committed()

    monkeypatch.setattr(bench.store, "sync", lost_and_restarted_meanwhile)
    stored = await bench.one_request()
    assert (stored.state, stored.segments) == (TrajectoryState.RUNNING, ())
    assert bench.tracked.health.failed_prompts == set()
    await bench.store.close()


async def test_stream_is_closed_before_the_end_of_its_request_is_reported(
    tmp_path: Path,
) -> None:
    """After the report, the scheduler may submit the next request of the trajectory at once."""
    unexpected = TokenChunk(
        np.array([7], np.int32), np.full(1, -1.0, np.float32), PolicyVersion(0, 1), None
    )
    bench = Bench.of(tmp_path, config_of(), unexpected, chunk(8))
    order: list[str] = []
    generate = bench.engine.generate

    async def recording(request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        try:
            async for one in generate(request):
                yield one
        finally:
            order.append("closed")

    bench.engine.generate = recording  # type: ignore[method-assign]
    feed = bench.generation._feed
    bench.generation._feed = lambda event: (  # type: ignore[method-assign]
        order.append(type(event).__name__),
        feed(event),
    )
    await bench.one_request()
    assert order == ["closed", "Aborted"]
    assert len(bench.given_up) == 1, "the engine was not sent that version"
    await bench.store.close()


async def test_request_is_no_failure_when_it_ends_after_the_last_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Slow(Scripted):
        aborted: asyncio.Event = field(default_factory=asyncio.Event)

        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            await self.aborted.wait()
            yield chunk(end="abort")

        async def abort(self, request_ids: list[str]) -> None:
            self.aborted.set()

    monkeypatch.setattr("megatron_async.rollout.generation._ABORT_TRIES", 1)
    bench = Bench.of(tmp_path, config_of())
    bench.tracked = verified_engine(Slow([]))
    bench.generation.submit(bench.trajectory_id, bench.tracked)
    await asyncio.sleep(0)
    await bench.generation.abort(bench.generation.mark_for_abort())
    assert bench.outcomes == [ev.Aborted(bench.trajectory_id)]
    assert bench.given_up == [] and bench.statistics.warnings == {}
    await bench.store.close()


@pytest.mark.parametrize("end", ["stop", None])
async def test_trajectory_is_finished_when_its_engine_is_lost_during_the_last_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str | None
) -> None:
    """The result is the same whether the engine had reported the end (`end`) or not."""
    bench = Bench.of(tmp_path, config_of(), chunk(7, STOP, end=end), chunk(9, end="stop"))
    committed = bench.store.sync

    async def lost_meanwhile() -> int:
        if bench.tracked.health.requests:
            monkeypatch.undo()
            bench.generation.detach_engine(bench.tracked, failed=True)
        return await committed()

    monkeypatch.setattr(bench.store, "sync", lost_meanwhile)
    stored = await bench.one_request()
    assert bench.outcomes == [ev.Finished(bench.trajectory_id)]
    assert (stored.state, stored.finish_reason) == (TrajectoryState.FINISHED, FinishReason.STOP)
    assert [s.token_ids.tolist() for s in stored.segments] == [[7, STOP]]
    await bench.store.close()


async def test_refused_request_counts_against_its_prompt_only(tmp_path: Path) -> None:
    bench = Bench.of(tmp_path, config_of(), RequestRefused("too long"))
    stored = await bench.one_request()
    assert bench.outcomes == [ev.Refused(bench.trajectory_id)]
    # The trajectory is partial until the scheduler drops its group.
    assert stored.state is TrajectoryState.PARTIAL
    assert bench.refused == ["too long"]
    assert bench.suspected == bench.given_up == [] and bench.tracked.health.failed_prompts == set()
    await bench.store.close()


async def test_prompt_is_refused_when_only_its_requests_fail_repeatedly(tmp_path: Path) -> None:
    """The engine replies and serves other prompts, so it stays in service."""
    bench = Bench.of(tmp_path, config_of(), LOST)
    for times in range(1, 6):
        await bench.one_request()
        assert bench.outcomes == times * [ev.Aborted(bench.trajectory_id)]
    await bench.one_request()
    assert bench.outcomes[-1] == ev.Refused(bench.trajectory_id)
    assert bench.refused == [
        "it failed 6 times in a row on engines that serve others: scripted died"
    ]
    assert len(bench.suspected) == 6 and bench.given_up == []
    await bench.store.close()


async def test_engine_is_removed_when_several_prompts_in_a_row_fail_on_it(tmp_path: Path) -> None:
    """The engine replies, but every request fails on it."""
    bench = Bench.of(tmp_path, config_of(), LOST)
    for prompts in range(1, 4):
        assert bench.given_up == []
        await bench.one_request()
        assert len(bench.tracked.health.failed_prompts) == prompts
        group = bench.store.add_group(Prompt(np.array([5, prompts], np.int32), "fixed"), 1)
        bench.trajectory_id = group.trajectories[0].trajectory_id
    [why] = bench.given_up
    assert "requests of 3 prompts in a row failed" in why
    await bench.store.close()


class Quiet(Scripted):
    """Engine that yields its scripted items and then neither a token nor an end."""

    aborts = 0

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        async for item in super().generate(request):
            yield item
        await asyncio.Event().wait()

    async def abort(self, request_ids: list[str]) -> None:
        self.aborts += 1


async def quiet(bench: Bench) -> TrackedEngine:
    """Submit a request to a `Quiet` engine with the clock `bench.now`, and wait until token 7 is
    stored."""
    tracked = verified_engine(Quiet([chunk(7)]), lambda: bench.now)
    tracked.health.queue(0, 0.0)
    bench.generation.submit(bench.trajectory_id, tracked)
    while bench.statistics.counts.tokens < 1:
        await asyncio.sleep(0)
    while tracked.health.request_clock(2.0) == tracked.health.request_clock(1.0):
        await asyncio.sleep(0)  # The clock of the request is stopped until the token is stored.
    return tracked


async def test_request_is_cut_off_and_its_engine_kept_when_it_is_silent(tmp_path: Path) -> None:
    bench = Bench.of(tmp_path, config_of())
    tracked = await quiet(bench)
    tracked.health.suspend("pause", 100.0)
    tracked.health.release("pause", 900.0)
    bench.now = 1399.0
    bench.generation.end_silent(tracked, 600.0)
    assert bench.outcomes == []
    bench.now = 1401.0
    bench.generation.end_silent(tracked, 600.0)
    assert bench.outcomes == [ev.Aborted(bench.trajectory_id)]
    assert (
        "no token came from engine scripted for 600 s"
        in bench.statistics.warnings["request_silent"]
    )
    assert bench.given_up == bench.suspected == [] and len(bench.generation) == 0
    await bench.store.close()


async def test_request_is_cut_off_and_its_engine_kept_when_an_abort_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron_async.rollout.generation._ABORT_WAIT_SECONDS", 0.01)
    bench = Bench.of(tmp_path, config_of())
    bench.tracked = await quiet(bench)
    await bench.generation.abort(bench.generation.mark_for_abort())
    assert bench.outcomes == [ev.Aborted(bench.trajectory_id)]
    assert "did not end the request" in bench.statistics.warnings["abort_ignored"]
    assert bench.given_up == bench.suspected == []
    engine = bench.tracked.client._client  # type: ignore[attr-defined]
    assert engine.aborts == 1  # The abort is not repeated, because the engine accepted it.
    await bench.store.close()


async def test_abort_waits_for_late_ends_while_some_requests_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine the ends arrive one by one, after the tokens before them. The last end
    comes after 1.2 s. If every try counted, the requests would be cut off after three tries, 0.9 s.
    Ends are only 0.15 s apart, so even a slow test machine sees one during three tries."""
    monkeypatch.setattr("megatron_async.rollout.generation._ABORT_WAIT_SECONDS", 0.3)
    monkeypatch.setattr("megatron_async.rollout.generation._ABORT_TRIES", 3)

    class Busy(Quiet):
        ends = 0

        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            yield chunk(7)
            while not self.aborts:
                await asyncio.sleep(0.001)
            self.ends += 1
            await asyncio.sleep(0.15 * self.ends)
            yield chunk(8, end="abort")

    bench = Bench.of(tmp_path, config_of())
    engine = Busy([])
    tracked = verified_engine(engine)
    group = bench.store.add_group(Prompt(np.array([5, 1], np.int32), "fixed"), 8)
    for trajectory in group.trajectories:
        bench.generation.submit(trajectory.trajectory_id, tracked)
    while bench.statistics.counts.tokens < 8:
        await asyncio.sleep(0.001)
    await bench.generation.abort(bench.generation.mark_for_abort())
    assert engine.aborts == 1 and bench.statistics.warnings == {}
    assert bench.statistics.counts.tokens == 16
    await bench.store.close()


@pytest.mark.parametrize("error", [EngineError("no answer"), None])
async def test_abort_is_retried_when_it_fails_or_the_engine_was_suspended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: EngineError | None
) -> None:
    """An engine that is suspended during the abort may have lost it."""
    monkeypatch.setattr("megatron_async.rollout.generation._ABORT_WAIT_SECONDS", 0.01)

    class Deaf(Quiet):
        async def abort(self, request_ids: list[str]) -> None:
            await super().abort(request_ids)
            if self.aborts == 1:
                tracked.suspend()
                tracked.release()
                if error is not None:
                    raise error

    bench = Bench.of(tmp_path, config_of())
    engine = Deaf([chunk(7)])
    tracked = verified_engine(engine)
    bench.generation.submit(bench.trajectory_id, tracked)
    while bench.statistics.counts.tokens < 1:
        await asyncio.sleep(0)
    await bench.generation.abort(bench.generation.mark_for_abort())
    assert engine.aborts == 2
    assert bench.suspected == ([] if error is None else ["no answer"])
    await bench.store.close()


@pytest.mark.parametrize("then", ["released", "given up"])
def test_abort_waits_for_release_when_the_engine_is_suspended(tmp_path: Path, then: str) -> None:
    async def body() -> None:
        bench = Bench.of(tmp_path, config_of())
        tracked = await quiet(bench)
        tracked.suspend()
        aborting = asyncio.create_task(bench.generation.abort(bench.generation.mark_for_abort()))
        for _ in range(20):
            await asyncio.sleep(0)
        engine = tracked.client._client  # type: ignore[attr-defined]
        assert engine.aborts == 0 and not aborting.done()
        if then == "given up":
            bench.generation.detach_engine(tracked, failed=True)
            await aborting
            assert engine.aborts == 0
        else:
            tracked.release()
            while not engine.aborts:
                await asyncio.sleep(0)
            aborting.cancel()
        await bench.generation.close()
        await bench.store.close()

    run(body())


def record_requests(engine: SimulatedEngine, requests: list[GenerationRequest]) -> None:
    """Make `engine` append each request that it gets to `requests`."""
    generate = engine.generate

    async def recording(request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        requests.append(request)
        async for one in generate(request):
            yield one

    engine.generate = recording  # type: ignore[method-assign]


KILLED = {
    "behind its stop token": ([7] * 3 + [STOP], FinishReason.STOP),
    "at its limit": ([7] * LIMIT, FinishReason.LENGTH),
    "at a limit that was lowered since": ([7] * (LIMIT + 2), FinishReason.LENGTH),
}


@pytest.mark.parametrize(("tokens", "reason"), KILLED.values(), ids=KILLED)
async def test_complete_response_is_finished_when_the_manager_died_before_its_end(
    tmp_path: Path, tokens: list[int], reason: FinishReason
) -> None:
    """An earlier version could leave a store with all tokens of a response but without its end."""
    config = config_of()
    store = TrajectoryStore.open(tmp_path / "store.sqlite", config.store)
    group = store.add_group(Prompt(np.array([5, 0], np.int32), "fixed"), 2)
    ended = group.trajectories[0].trajectory_id
    request = store.begin_request(ended)
    store.append(request, tokens, [-1.0] * len(tokens), V0, "engine0")
    await store.close()  # The tests in tests/crash kill the process instead.

    trainer = Trainer(tmp_path, config)
    await trainer.manager.start()
    requests: list[GenerationRequest] = []
    record_requests(trainer.engines.all[0], requests)
    await trainer.begin(ResumePoint(0))
    batch = await trainer.batch()
    index = batch.trajectory_ids_S.tolist().index(ended)
    start, end = batch.cu_seqlens_S1[index : index + 2]
    assert batch.token_ids_T[start:end].tolist() == [5, 0, *tokens]
    assert f"t{ended}" not in {request.request_id.partition("-")[0] for request in requests}
    assert all(request.max_new_tokens > 0 for request in requests)
    assert trajectories_in(tmp_path)[ended].finish_reason is reason
    await trainer.manager.stop()
