"""The end of a response: it is never lost behind its last token, and nothing is asked for after it.

`Generation` alone with a scripted engine, then a whole manager over a store that a kill left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.rollout.generation import EngineSlot, Generation, Reports, end_of
from megatron_async.rollout.interfaces import EngineError, GenerationRequest, TokenChunk
from megatron_async.rollout.manager import ResumePoint
from megatron_async.rollout.simulated_engine import SimulatedEngine
from megatron_async.rollout.statistics import RolloutStatistics
from megatron_async.scheduler import events as ev
from megatron_async.trajectory.store import TrajectoryStore
from megatron_async.trajectory.store_reader import StoreReader
from megatron_async.trajectory.types import (
    FinishReason,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
)
from tests.rollout.stand_ins import run, settings
from tests.rollout.test_manager import Trainer

STOP, LIMIT = 2, 6
V0 = PolicyVersion(0, 0)


def config_of(**changes: Any) -> RunConfig:
    base = {"sampling": {"max_new_tokens": LIMIT}, "store": {"chunk_tokens": 1}}
    return build_config(merge(settings("sync").model_dump(), merge(base, changes)))


def chunk(*token_ids: int, end: Any = None) -> TokenChunk:
    tokens = np.array(token_ids, np.int32)
    return TokenChunk(tokens, np.full(len(tokens), -1.0, np.float32), V0, end)


@dataclass
class Scripted:
    """An engine that says one thing after the other, to whoever asks."""

    script: list[TokenChunk | EngineError]
    engine_id: str = "scripted"
    asked: list[GenerationRequest] = field(default_factory=list)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        self.asked.append(request)
        for said in self.script:
            if isinstance(said, EngineError):
                raise said
            yield said

    async def abort(self, request_ids: list[str]) -> None:
        return None


@dataclass
class Bench:
    """`Generation` with one running trajectory of prompt (5, 0)."""

    store: TrajectoryStore
    generation: Generation
    slot: EngineSlot
    events: list[ev.Event]
    trajectory_id: int
    statistics: RolloutStatistics
    blamed: list[str]

    @classmethod
    def of(cls, folder: Path, config: RunConfig, *script: TokenChunk | EngineError) -> Bench:
        store = TrajectoryStore.open(folder / "store.sqlite", config.store)
        group = store.add_group(Prompt(np.array([5, 0], np.int32), "fixed"), 1)
        events: list[ev.Event] = []
        statistics = RolloutStatistics(overlap=config.schedule.overlap)
        blamed: list[str] = []
        reports = Reports(
            events.append, lambda _, why: blamed.append(why), lambda _: None, lambda _: None
        )
        generation = Generation(config, store, statistics, (STOP,), reports)
        slot = EngineSlot(Scripted(list(script)))  # type: ignore[arg-type]
        trajectory_id = group.trajectories[0].trajectory_id
        return cls(store, generation, slot, events, trajectory_id, statistics, blamed)

    async def one_request(self) -> Trajectory:
        """Run it to its end; what is kept then."""
        self.generation.submit(self.trajectory_id, self.slot)
        (request,) = self.generation._requests.values()
        assert request.task is not None
        await asyncio.wait_for(asyncio.wait([request.task]), 10)
        if not request.task.cancelled() and (error := request.task.exception()) is not None:
            raise error  # here, as in a run, it must not vanish
        return self.store.load_trajectory(self.trajectory_id)

    @property
    def outcomes(self) -> list[ev.Event]:
        return [event for event in self.events if not isinstance(event, ev.TokensArrived)]


LOST = EngineError("scripted died")
ENDS = {
    "said with the last token": ([chunk(7, STOP, end="stop")], FinishReason.STOP),
    "said by itself": ([chunk(7), chunk(9), chunk(end="stop")], FinishReason.STOP),
    "a stop string, said": ([chunk(7, 8, end="stop")], FinishReason.STOP),
    "lost after the stop token": ([chunk(7, STOP), LOST], FinishReason.STOP),
    "aborted at the stop token": ([chunk(7, STOP, end="abort")], FinishReason.STOP),
    "the limit, said": ([chunk(*[7] * LIMIT, end="length")], FinishReason.LENGTH),
    "lost at the limit": ([chunk(*[7] * LIMIT), LOST], FinishReason.LENGTH),
    "aborted at the limit": ([chunk(*[7] * LIMIT, end="abort")], FinishReason.LENGTH),
    "lost before": ([chunk(7, STOP, 8), LOST], None),
    "aborted before": ([chunk(7), chunk(8, end="abort")], None),
    "aborted without a token": ([chunk(end="abort")], None),
}


@pytest.mark.parametrize(("script", "reason"), ENDS.values(), ids=ENDS)
def test_a_response_is_finished_when_it_has_ended_and_partial_when_not(
    tmp_path: Path, script: list[TokenChunk | EngineError], reason: FinishReason | None
) -> None:
    async def body() -> None:
        bench = Bench.of(tmp_path, config_of(), *script)
        kept = await bench.one_request()
        i = bench.trajectory_id
        if reason is None:
            assert (kept.state, bench.outcomes) == (TrajectoryState.PARTIAL, [ev.Aborted(i)])
        else:
            assert (kept.state, bench.outcomes) == (TrajectoryState.FINISHED, [ev.Finished(i)])
        assert kept.finish_reason is reason
        await bench.store.close()

    run(body())


def test_a_forced_length_is_reached_whatever_the_tokens_are(tmp_path: Path) -> None:
    async def body() -> None:
        config = config_of(experiment={"forced_lengths": [4]})
        bench = Bench.of(tmp_path, config, chunk(7, STOP, end="abort"))
        assert (await bench.one_request()).state is TrajectoryState.PARTIAL
        kept = await bench.one_request()
        assert (kept.state, kept.finish_reason) == (TrajectoryState.FINISHED, FinishReason.LENGTH)
        engine = bench.slot.client
        assert isinstance(engine, Scripted)
        assert [(r.max_new_tokens, r.ignore_eos) for r in engine.asked] == [(4, True), (2, True)]
        await bench.store.close()

    run(body())


@pytest.mark.parametrize("last", [chunk(7, STOP, end="stop"), chunk(7, 8, end="stop")])
def test_no_await_is_between_the_last_tokens_and_their_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: TokenChunk
) -> None:
    """Also when the tokens alone do not tell: who is killed or closed here must leave both."""

    async def body() -> None:
        bench = Bench.of(tmp_path, config_of(), last)
        committed, states = bench.store.sync, []

        async def noted() -> int:
            states.append(bench.store.load_trajectory(bench.trajectory_id).state)
            return await committed()

        monkeypatch.setattr(bench.store, "sync", noted)
        await bench.one_request()
        assert states == [TrajectoryState.FINISHED]
        await bench.store.close()

    run(body())


@pytest.mark.parametrize(
    "more", [chunk(9, end="stop"), chunk(9), LOST], ids=["end", "token", "error"]
)
def test_the_old_stream_of_a_lost_engine_is_not_heard_when_its_trajectory_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: TokenChunk | EngineError
) -> None:
    """It had said that the response is complete, which was then restarted on another engine."""

    async def body() -> None:
        bench = Bench.of(tmp_path, config_of(), chunk(7, STOP, end="stop"), more)
        committed = bench.store.sync

        async def lost_and_restarted_meanwhile() -> int:
            monkeypatch.undo()
            bench.generation.forget_engine(bench.slot)
            bench.store.restart(bench.trajectory_id)
            bench.store.set_state(bench.trajectory_id, TrajectoryState.RUNNING)
            return await committed()

        monkeypatch.setattr(bench.store, "sync", lost_and_restarted_meanwhile)
        kept = await bench.one_request()
        assert (kept.state, kept.segments) == (TrajectoryState.RUNNING, ())
        assert bench.slot.errors_in_row == 0
        await bench.store.close()

    run(body())


def test_what_an_engine_says_after_the_end_is_a_warning_and_nothing_else(tmp_path: Path) -> None:
    async def body() -> None:
        script = chunk(7, STOP, end="stop"), chunk(9), chunk(9, end="stop")
        bench = Bench.of(tmp_path, config_of(), *script)
        kept = await bench.one_request()
        assert bench.outcomes == [ev.Finished(bench.trajectory_id)]
        assert [s.token_ids.tolist() for s in kept.segments] == [[7, STOP]]
        assert bench.statistics.tokens == 2
        assert "engine scripted went on" in bench.statistics.warnings["said_after_its_end"]
        await bench.store.close()

    run(body())


def test_who_ends_behind_the_last_abort_is_not_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Slow(Scripted):
        told: asyncio.Event = field(default_factory=asyncio.Event)

        async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            await self.told.wait()
            yield chunk(end="abort")

        async def abort(self, request_ids: list[str]) -> None:
            self.told.set()

    async def body() -> None:
        monkeypatch.setattr("megatron_async.rollout.generation._ABORT_TRIES", 1)
        bench = Bench.of(tmp_path, config_of())
        bench.slot.client = Slow([])  # type: ignore[assignment]
        bench.generation.submit(bench.trajectory_id, bench.slot)
        await asyncio.sleep(0)
        await bench.generation.abort(bench.generation.of())
        assert bench.outcomes == [ev.Aborted(bench.trajectory_id)]
        assert bench.blamed == []
        await bench.store.close()

    run(body())


@pytest.mark.parametrize("end", ["stop", None])
def test_an_engine_that_is_lost_while_the_last_tokens_are_committed_has_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str | None
) -> None:
    """Whether it had said so or not (`end`)."""

    async def body() -> None:
        bench = Bench.of(tmp_path, config_of(), chunk(7, STOP, end=end), chunk(9, end="stop"))
        committed = bench.store.sync

        async def lost_meanwhile() -> int:
            if bench.slot.running:
                monkeypatch.undo()
                bench.generation.forget_engine(bench.slot)
            return await committed()

        monkeypatch.setattr(bench.store, "sync", lost_meanwhile)
        kept = await bench.one_request()
        assert bench.outcomes == [ev.Finished(bench.trajectory_id)]
        assert (kept.state, kept.finish_reason) == (TrajectoryState.FINISHED, FinishReason.STOP)
        assert [s.token_ids.tolist() for s in kept.segments] == [[7, STOP]]
        await bench.store.close()

    run(body())


def test_only_what_the_policy_wrote_last_can_end_a_response() -> None:
    def response(*segments: Segment) -> Trajectory:
        return Trajectory(0, 0, Prompt(np.array([5], np.int32), "fixed"), segments=segments)

    def said(*tokens: int, from_environment: bool = False) -> Segment:
        values = np.zeros(len(tokens), np.float32)
        return Segment(np.array(tokens, np.int32), values, V0, "e", from_environment)

    stopped, told = said(7, STOP), said(STOP, from_environment=True)
    assert end_of(response(), LIMIT, (STOP,)) is None
    assert end_of(response(stopped), LIMIT, (STOP,)) is FinishReason.STOP
    assert end_of(response(stopped), LIMIT, ()) is None
    assert end_of(response(stopped), 2, ()) is FinishReason.LENGTH
    assert end_of(response(stopped), 1, ()) is FinishReason.LENGTH  # a limit that was lowered
    assert end_of(response(said(7), told), LIMIT, (STOP,)) is None
    assert end_of(response(told, said(7)), LIMIT, (STOP,)) is None


def spied(engine: SimulatedEngine, asked: list[GenerationRequest]) -> None:
    """Note what `engine` is asked for."""
    generate = engine.generate

    async def noting(request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        asked.append(request)
        async for one in generate(request):
            yield one

    engine.generate = noting  # type: ignore[method-assign]


KILLED = {
    "behind its stop token": ([7] * 3 + [STOP], FinishReason.STOP),
    "at its limit": ([7] * LIMIT, FinishReason.LENGTH),
    "at a limit that was lowered since": ([7] * (LIMIT + 2), FinishReason.LENGTH),
}


@pytest.mark.parametrize(("tokens", "reason"), KILLED.values(), ids=KILLED)
def test_a_manager_that_was_killed_before_it_noted_the_end_does_not_go_on(
    tmp_path: Path, tokens: list[int], reason: FinishReason
) -> None:
    """Such a file is what a version before this one left, or a salvage."""

    async def body() -> None:
        config = config_of()
        store = TrajectoryStore.open(tmp_path / "store.sqlite", config.store)
        group = store.add_group(Prompt(np.array([5, 0], np.int32), "fixed"), 2)
        ended = group.trajectories[0].trajectory_id
        store.set_state(ended, TrajectoryState.RUNNING)
        store.append(ended, tokens, [-1.0] * len(tokens), V0, "engine0")
        await store.close()  # killed for real in tests/crash

        trainer = Trainer(tmp_path, config)
        await trainer.manager.start()
        asked: list[GenerationRequest] = []
        spied(trainer.engines.all[0], asked)
        await trainer.begin(ResumePoint(0))
        batch = await trainer.batch()
        place = batch.trajectory_ids_S.tolist().index(ended)
        start, end = batch.cu_seqlens_S1[place : place + 2]
        assert batch.token_ids_T[start:end].tolist() == [5, 0, *tokens]
        assert f"t{ended}" not in {request.request_id.partition("-")[0] for request in asked}
        assert all(request.max_new_tokens > 0 for request in asked)
        with closing(StoreReader(tmp_path / "store.sqlite")) as reader:
            assert reader.trajectory(ended).finish_reason is reason
        await trainer.manager.stop()

    run(body())
