"""An engine read through its relay is the engine, and a lost relay costs a chunk a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import cast

import numpy as np
import pytest

from megatron_async.config.rollout import SamplingConfig
from megatron_async.engines.interface import (
    EngineClient,
    EngineError,
    GenerationRequest,
    RequestRefused,
    StreamEnd,
    TokenChunk,
)
from megatron_async.engines.relay import Pace, RelayedEngine, Started, StreamRelay
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.engines.token_report import TokenReport
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import PolicyVersion

MODEL = SimulatedEngineModel(mean_length=10**9, step_seconds=0.0005, stream_interval=8)


def request(name: str, most: int = 40) -> GenerationRequest:
    prompt = np.array([5, sum(map(ord, name))], np.int32)
    return GenerationRequest(name, prompt, most, SamplingConfig())


class Lossy(StreamRelay):
    """A relay whose process may be lost: every call fails from then on."""

    lost = False

    async def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None:  # type: ignore[override]
        self._check()
        super().update(started, canceled)

    async def report(self, acknowledged: Sequence[int]) -> TokenReport:
        self._check()
        report = await super().report(acknowledged)
        self._check()
        return report

    def _check(self) -> None:
        if self.lost:
            raise EngineError("the relay of e: its Ray actor has died")


def relayed(engine: EngineClient, chunk_tokens: int = 16) -> tuple[RelayedEngine, Lossy]:
    relay = Lossy(engine, chunk_tokens)
    return RelayedEngine(engine, relay, Pace()), relay


async def collect(engine: EngineClient, wanted: GenerationRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(wanted)]


def tokens(chunks: Sequence[TokenChunk]) -> list[int]:
    return [int(token) for chunk in chunks for token in chunk.token_ids]


async def test_many_streams_bring_what_the_engine_itself_brings() -> None:
    engine = SimulatedEngine("e", MODEL)
    client, relay = relayed(engine)
    names = [f"r{i}" for i in range(40)]
    through = await asyncio.gather(*(collect(client, request(name)) for name in names))
    direct = await asyncio.gather(*(collect(engine, request(name)) for name in names))
    for chunks, wanted in zip(through, direct, strict=True):
        assert tokens(chunks) == tokens(wanted) and len(tokens(chunks)) == 40
        assert [float(p) for c in chunks for p in c.logprobs] == [
            float(p) for c in wanted for p in c.logprobs
        ]
        assert [c.end for c in chunks] == [*([None] * (len(chunks) - 1)), "length"]
    assert not relay._readers and client._pace.streams == 0
    await client.close()
    await relay.close()


class Flooded:
    """An engine that has made 40 chunks of a response, of two versions, before they are read."""

    engine_id, url = "e", ""

    def __init__(self) -> None:
        self.read = self.read_at_abort = 0
        self.aborted = asyncio.Event()

    async def generate(self, wanted: GenerationRequest) -> AsyncIterator[TokenChunk]:
        for place in range(40):
            self.read += 1
            yield self.chunk(range(8 * place, 8 * place + 8), place >= 25)
        await self.aborted.wait()
        yield self.chunk(range(0), True, "abort")

    def chunk(self, ids: range, newer: bool, end: StreamEnd | None = None) -> TokenChunk:
        tokens = np.array(ids, np.int32)
        return TokenChunk(tokens, -tokens.astype(np.float32), PolicyVersion(0, newer), end)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await asyncio.sleep(0.05)  # on its way
        self.read_at_abort = self.read
        self.aborted.set()

    async def close(self) -> None:
        return None


async def test_the_end_of_an_aborted_stream_waits_behind_one_item_of_each_version() -> None:
    """Whatever the engine had made before, and without an acknowledgement; nothing of it is lost.

    Until the engine has heard the abort, no more is read than at any time.
    """
    engine = Flooded()
    relay = StreamRelay(cast(EngineClient, engine), 16)
    relay.update([(0, request("a"))], [])
    chunks = [item for _, item in (await relay.report([])).items()]
    assert not list((await relay.report([])).items())  # as much as there is room for
    read = engine.read
    await relay.abort({"a": 0, "gone": 1})
    assert engine.read_at_abort == read < 5
    rest = [item for _, item in (await relay.report([])).items()]
    assert len(rest) == 2
    chunks += rest
    assert all(isinstance(chunk, TokenChunk) for chunk in chunks)
    whole = cast(list[TokenChunk], chunks)
    assert tokens(whole) == list(range(320)) and whole[-1].end == "abort"
    assert {(c.version.number, int(t) >= 200) for c in whole for t in c.token_ids} == {
        (0, False),
        (1, True),
    }
    await relay.close()


async def test_an_abort_ends_at_once_what_was_not_sent_yet() -> None:
    class Stuck(Lossy):
        async def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None:  # type: ignore[override]
            sent.extend(request.request_id for _, request in started)
            await answered.wait()
            await super().update(started, canceled)

    sent: list[str] = []
    answered = asyncio.Event()
    relay = Stuck(SimulatedEngine("e", MODEL), 16)
    client = RelayedEngine(SimulatedEngine("e", MODEL), relay, Pace())
    first = asyncio.create_task(collect(client, request("first", 10**6)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second = asyncio.create_task(collect(client, request("second", 10**6)))
    while len(client._started) < 1:
        await asyncio.sleep(0)
    aborting = asyncio.create_task(client.abort(["first", "second"]))
    [end] = await second
    assert end.end == "abort" and not aborting.done() and not first.done()
    answered.set()
    await aborting
    assert (await first)[-1].end == "abort" and sent == ["first"]
    await client.close()
    await relay.close()


async def test_ends_of_aborted_streams_do_not_wait_for_the_pause_between_reports() -> None:
    """An update waits for them; the pause is for thousands of streams that go on.

    Nor do they wait for the engine's reply to the abort, which comes behind thousands of ends.
    """

    class Slow(Pace):
        seconds = 3600.0  # type: ignore[assignment]

    class Busy(Lossy):
        async def abort(self, requests: Mapping[str, int]) -> None:
            await super().abort(requests)
            await ended.wait()

    ended = asyncio.Event()
    engine = SimulatedEngine("e", MODEL)
    relay = Busy(engine, 16)
    client = RelayedEngine(engine, relay, Slow())
    arrived: list[int] = []

    async def read(name: str) -> str | None:
        async for chunk in client.generate(request(name, 10**6)):
            arrived.append(len(chunk.token_ids))
        return chunk.end

    streams = [asyncio.create_task(read(name)) for name in ("a", "b")]
    while not arrived:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # the pause has begun
    aborting = asyncio.create_task(client.abort(["a", "b", "c"]))
    assert await asyncio.gather(*streams) == ["abort", "abort"]
    ended.set()
    await aborting
    assert not client._aborted
    await client.close()
    await relay.close()


async def test_a_stream_that_is_not_read_on_is_ended_at_the_engine() -> None:
    engine = SimulatedEngine("e", MODEL)
    client, relay = relayed(engine)
    async for _ in client.generate(request("a", 10**6)):
        break
    while relay._readers or (await engine.status()).running_requests:
        await asyncio.sleep(0.01)
    await relay.close()


async def test_what_is_not_acknowledged_stays_below_two_chunks_and_others_go_on() -> None:
    """The consumer that holds a chunk (its commit hangs, its version is not verified)."""
    client, relay = relayed(SimulatedEngine("e", MODEL))
    held = cast(AsyncIterator[TokenChunk], client.generate(request("held", 10**6)))
    await anext(held)
    assert len(tokens(await collect(client, request("other", 200)))) == 200
    assert relay._outbox.held(0) < 2 * 16
    more = [await anext(held) for _ in range(20)]  # it flows again
    assert len(tokens(more)) >= 20 * 8
    await relay.close()


async def test_a_failure_belongs_to_its_stream() -> None:
    class Refuses(SimulatedEngine):
        def generate(self, wanted: GenerationRequest) -> AsyncIterator[TokenChunk]:
            if wanted.request_id == "bad":
                raise RequestRefused("too long")
            if wanted.request_id == "defect":
                raise KeyError("defect")
            return super().generate(wanted)

    client, relay = relayed(Refuses("e", MODEL))
    results = await asyncio.gather(
        *(collect(client, request(name)) for name in ("good", "bad", "defect")),
        return_exceptions=True,
    )
    assert isinstance(results[0], list) and len(tokens(results[0])) == 40
    assert isinstance(results[1], RequestRefused) and str(results[1]) == "too long"
    assert isinstance(results[2], ComponentFailure)  # no engine's fault
    await relay.close()


async def test_a_lost_relay_is_heard_of_by_every_stream_and_costs_each_a_chunk() -> None:
    client, relay = relayed(SimulatedEngine("e", MODEL))
    arrived: dict[str, int] = dict.fromkeys("abc", 0)

    async def read(name: str) -> None:
        async for chunk in client.generate(request(name, 10**6)):
            arrived[name] += len(chunk.token_ids)

    streams = [asyncio.create_task(read(name)) for name in arrived]
    while min(arrived.values()) < 40:
        await asyncio.sleep(0.005)
    relay.lost = True
    results = await asyncio.gather(*streams, return_exceptions=True)
    assert [type(result) for result in results] == [EngineError] * 3
    for stream in range(3):
        assert relay._outbox.held(stream) < 2 * 16
    with pytest.raises(EngineError, match="has died"):
        await collect(client, request("later"))
    await client.close()
    with pytest.raises(EngineError, match="has been closed"):
        await collect(client, request("much later"))
    await relay.close()


async def test_a_closed_client_leaves_no_stream_waiting() -> None:
    client, relay = relayed(SimulatedEngine("e", MODEL))
    stream = asyncio.create_task(collect(client, request("a", 10**6)))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(EngineError, match="has been closed"):
        await stream
    await relay.close()


def test_the_pause_between_reports_grows_with_streams_and_engines() -> None:
    pace, seconds = Pace(), []
    for pace.streams, pace.engines in ((0, 0), (8, 1), (64, 4), (4096, 4), (16384, 64)):
        seconds.append(pace.seconds)
    assert seconds == sorted(seconds) and seconds[1] <= 0.01 and seconds[-2:] == [0.1, 0.1]
