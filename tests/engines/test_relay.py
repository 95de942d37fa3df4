"""Tests `RelayedEngine`: its streams equal the engine's own streams, and a lost relay costs each
stream less than two chunks."""

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


class LossyRelay(StreamRelay):
    """A relay whose process may be lost: every call fails once `lost` is true."""

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


def relayed(engine: EngineClient, chunk_tokens: int = 16) -> tuple[RelayedEngine, LossyRelay]:
    relay = LossyRelay(engine, chunk_tokens)
    return RelayedEngine(engine, relay, Pace()), relay


async def collect(engine: EngineClient, request: GenerationRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


def tokens(chunks: Sequence[TokenChunk]) -> list[int]:
    return [int(token) for chunk in chunks for token in chunk.token_ids]


async def test_relayed_streams_equal_the_streams_of_the_engine() -> None:
    engine = SimulatedEngine("e", MODEL)
    client, relay = relayed(engine)
    names = [f"r{i}" for i in range(40)]
    relayed_chunks = await asyncio.gather(*(collect(client, request(name)) for name in names))
    direct_chunks = await asyncio.gather(*(collect(engine, request(name)) for name in names))
    for chunks, expected in zip(relayed_chunks, direct_chunks, strict=True):
        assert tokens(chunks) == tokens(expected) and len(tokens(chunks)) == 40
        assert [float(p) for c in chunks for p in c.logprobs] == [
            float(p) for c in expected for p in c.logprobs
        ]
        assert [c.end for c in chunks] == [*([None] * (len(chunks) - 1)), "length"]
    assert not relay._readers and client._pace.streams == 0
    await client.close()
    await relay.close()


class FloodedEngine:
    """An engine that has generated 40 chunks of a response, of two versions, before the first is
    read."""

    engine_id, url = "e", ""

    def __init__(self) -> None:
        self.read = self.read_at_abort = 0
        self.aborted = asyncio.Event()

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        for index in range(40):
            self.read += 1
            yield self.chunk(range(8 * index, 8 * index + 8), index >= 25)
        await self.aborted.wait()
        yield self.chunk(range(0), True, "abort")

    def chunk(self, ids: range, newer: bool, end: StreamEnd | None = None) -> TokenChunk:
        tokens = np.array(ids, np.int32)
        return TokenChunk(tokens, -tokens.astype(np.float32), PolicyVersion(0, newer), end)

    async def abort(self, request_ids: Sequence[str]) -> None:
        await asyncio.sleep(0.05)  # The abort takes some time to reach the engine.
        self.read_at_abort = self.read
        self.aborted.set()

    async def close(self) -> None:
        return None


async def test_relay_reports_end_of_aborted_stream_after_one_item_per_version() -> None:
    """The number of chunks that the engine has generated and missing acknowledgments do not matter,
    and no chunk is lost. Until the engine has received the abort, the relay reads no more than
    usual."""
    engine = FloodedEngine()
    relay = StreamRelay(cast(EngineClient, engine), 16)
    relay.update([(0, request("a"))], [])
    chunks = [item for _, item in (await relay.report([])).items()]
    # The stream has reached its limit, so that nothing more is read.
    assert not list((await relay.report([])).items())
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


async def test_relayed_engine_ends_unsent_request_at_once_when_aborted() -> None:
    class StuckRelay(LossyRelay):
        async def update(self, started: Sequence[Started], canceled: Sequence[int]) -> None:  # type: ignore[override]
            sent.extend(request.request_id for _, request in started)
            await answered.wait()
            await super().update(started, canceled)

    sent: list[str] = []
    answered = asyncio.Event()
    relay = StuckRelay(SimulatedEngine("e", MODEL), 16)
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


async def test_aborted_streams_end_without_waiting_for_the_pause_between_reports() -> None:
    """A weight update waits for the ends of aborted streams; the pause serves thousands of running
    streams.

    The ends do not wait for the engine's reply to the abort either, which comes after thousands of
    ends.
    """

    class SlowPace(Pace):
        seconds = 3600.0  # type: ignore[assignment]

    class BusyRelay(LossyRelay):
        async def abort(self, requests: Mapping[str, int]) -> None:
            await super().abort(requests)
            await ended.wait()

    ended = asyncio.Event()
    engine = SimulatedEngine("e", MODEL)
    relay = BusyRelay(engine, 16)
    client = RelayedEngine(engine, relay, SlowPace())
    arrived: list[int] = []

    async def read(name: str) -> str | None:
        async for chunk in client.generate(request(name, 10**6)):
            arrived.append(len(chunk.token_ids))
        return chunk.end

    streams = [asyncio.create_task(read(name)) for name in ("a", "b")]
    while not arrived:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # The pause between reports has started.
    aborting = asyncio.create_task(client.abort(["a", "b", "c"]))
    assert await asyncio.gather(*streams) == ["abort", "abort"]
    ended.set()
    await aborting
    assert not client._aborted
    await client.close()
    await relay.close()


async def test_engine_request_ends_when_the_reader_abandons_its_stream() -> None:
    engine = SimulatedEngine("e", MODEL)
    client, relay = relayed(engine)
    async for _ in client.generate(request("a", 10**6)):
        break
    while relay._readers or (await engine.status()).running_requests:
        await asyncio.sleep(0.01)
    await relay.close()


async def test_unread_stream_buffers_under_two_chunks_while_other_streams_continue() -> None:
    """The consumer does not continue to read after a chunk, for example because its commit hangs or
    its version is not verified."""
    client, relay = relayed(SimulatedEngine("e", MODEL))
    held = cast(AsyncIterator[TokenChunk], client.generate(request("held", 10**6)))
    await anext(held)
    assert len(tokens(await collect(client, request("other", 200)))) == 200
    assert relay._outbox.held(0) < 2 * 16
    # Reading the stream acknowledges its tokens, so that the relay reads more of them.
    more = [await anext(held) for _ in range(20)]
    assert len(tokens(more)) >= 20 * 8
    await relay.close()


async def test_stream_failure_does_not_affect_other_streams() -> None:
    class RefusingEngine(SimulatedEngine):
        def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
            if request.request_id == "bad":
                raise RequestRefused("too long")
            if request.request_id == "defect":
                raise KeyError("defect")
            return super().generate(request)

    client, relay = relayed(RefusingEngine("e", MODEL))
    results = await asyncio.gather(
        *(collect(client, request(name)) for name in ("good", "bad", "defect")),
        return_exceptions=True,
    )
    assert isinstance(results[0], list) and len(tokens(results[0])) == 40
    assert isinstance(results[1], RequestRefused) and str(results[1]) == "too long"
    # A ComponentFailure, because the engine is not at fault.
    assert isinstance(results[2], ComponentFailure)
    await relay.close()


async def test_every_stream_fails_and_loses_under_two_chunks_when_relay_is_lost() -> None:
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


async def test_relayed_stream_fails_when_the_client_is_closed() -> None:
    client, relay = relayed(SimulatedEngine("e", MODEL))
    stream = asyncio.create_task(collect(client, request("a", 10**6)))
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(EngineError, match="has been closed"):
        await stream
    await relay.close()


def test_pace_seconds_grow_with_streams_and_engines() -> None:
    pace, seconds = Pace(), []
    for pace.streams, pace.engines in ((0, 0), (8, 1), (64, 4), (4096, 4), (16384, 64)):
        seconds.append(pace.seconds)
    assert seconds == sorted(seconds) and seconds[1] <= 0.01 and seconds[-2:] == [0.1, 0.1]
