"""The simulated engine as a server: for a client and for the trainer it is a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.config.rollout import EngineConfig, SimulatedEngineConfig
from megatron_async.engines.host import EngineHost, HostCalls
from megatron_async.engines.interface import EngineError, RequestRefused, TokenChunk
from megatron_async.engines.relay import Pace, RelayedEngine
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import NO_VERSION, SGLangProcess
from megatron_async.engines.simulated.engine import SimulatedEngine
from megatron_async.engines.simulated.server import engine_model, parameter_names
from megatron_async.errors import UserError
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress, call
from tests.engine import collect, logprobs_of, make_request, tokens_of, until_streaming
from tests.hf_models import save_hf_model

SETTINGS = EngineConfig(
    kind="simulated",
    api_key="secret",
    stream_interval=4,
    simulated=SimulatedEngineConfig(mean_length=1000, step_seconds=0.002),
)
PROMPT = [5, 9, 17]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SGLangProcess, Path]]:
    folder = tmp_path_factory.mktemp("simulated")
    save_hf_model("qwen3", folder / "model", vocab_size=128, max_position_embeddings=2048)
    process = SGLangProcess(folder / "model", SETTINGS, folder / "engine.log")
    process.start()
    try:
        yield process, folder / "model"
    finally:
        process.stop()


def with_client(process: SGLangProcess, body: Any) -> Any:
    async def run() -> Any:
        client = await SGLangClient.connect("engine", process.url, SETTINGS)
        try:
            return await asyncio.wait_for(body(client), 20)
        finally:
            await client.close()

    return asyncio.run(run())


def test_its_http_responses_are_those_of_the_engine(server: tuple[SGLangProcess, Path]) -> None:
    process, model = server
    request = make_request("r", PROMPT, 50)

    async def here() -> list[TokenChunk]:
        return await collect(SimulatedEngine("here", engine_model(SETTINGS, model)), request)

    there = with_client(process, lambda client: collect(client, request))
    assert (tokens_of(there) == tokens_of(asyncio.run(here()))).all()
    assert (logprobs_of(there) == logprobs_of(asyncio.run(here()))).all()
    assert there[-1].end == "length" and there[0].version == NO_VERSION


def test_a_request_that_is_too_long_is_refused_and_others_are_served(
    server: tuple[SGLangProcess, Path],
) -> None:
    async def body(client: SGLangClient) -> list[TokenChunk]:
        assert client.longest_tokens == SETTINGS.longest_tokens(None) == 65536 - 6
        with pytest.raises(RequestRefused, match="status 400"):
            await collect(client, make_request("long", PROMPT, 65536))
        return await collect(client, make_request("short", PROMPT, 5))

    assert with_client(server[0], body)[-1].end == "length"


def test_one_call_aborts_all_requests_of_an_engine_and_no_more_than_it_is_asked_for(
    server: tuple[SGLangProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(client: SGLangClient) -> list[list[TokenChunk]]:
        posted: list[Any] = []
        post = client._post

        async def noted(path: str, sent: Any) -> Any:
            posted.append(sent)
            return await post(path, sent)

        monkeypatch.setattr(client, "_post", noted)
        names = [f"r{i}" for i in range(20)]
        arrived: list[list[TokenChunk]] = [[] for _ in names]
        tasks = [
            asyncio.create_task(collect(client, make_request(name, PROMPT, 60_000), into))
            for name, into in zip(names, arrived, strict=True)
        ]
        await until_streaming(arrived)
        await client.abort(names[:2])
        await asyncio.wait(tasks[:2])
        assert [task.done() for task in tasks] == [True] * 2 + [False] * 18
        assert [sent.get("abort_all") for sent in posted] == [None, None]
        del posted[:]
        await client.abort(names)
        responses = await asyncio.gather(*tasks)
        assert posted == [{"abort_all": True}]
        return responses

    assert {chunks[-1].end for chunks in with_client(server[0], body)} == {"abort"}


def test_an_abort_is_repeated_only_where_it_may_have_overtaken_its_request(
    server: tuple[SGLangProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has sent tokens of a request has it, and has answered the abort."""
    monkeypatch.setattr("megatron_async.engines.sglang.client._ABORT_AGAIN_SECONDS", 0.01)

    async def body(client: SGLangClient) -> list[Any]:
        posted: list[Any] = []
        post = client._post

        async def first_abort_lost(path: str, sent: Any) -> Any:
            if path == "abort_request":
                posted.append(sent)
                if len(posted) == 1:
                    return {}
            return await post(path, sent)

        monkeypatch.setattr(client, "_post", first_abort_lost)
        known: list[TokenChunk] = []
        running = asyncio.create_task(collect(client, make_request("known", PROMPT, 60_000), known))
        await until_streaming([known])
        await client.abort(["known"])
        await asyncio.sleep(0.2)
        assert len(posted) == 1
        await client.abort(["known"])
        await running
        await client.pause("in_place")
        del posted[:]
        new = asyncio.create_task(collect(client, make_request("new", PROMPT, 60_000)))
        while not (await client.status()).queued_requests:
            await asyncio.sleep(0.01)
        await client.abort(["new"])
        chunks = await new
        await client.resume()
        assert len(posted) == 2
        return [running.result()[-1].end, chunks[-1].end]

    assert with_client(server[0], body) == ["abort", "abort"]


def test_tokens_around_an_update_carry_their_versions(server: tuple[SGLangProcess, Path]) -> None:
    process, model = server
    weights = EngineAddress("engine", process.url)

    async def body(client: SGLangClient) -> list[TokenChunk]:
        arrived: list[TokenChunk] = []
        running = asyncio.create_task(collect(client, make_request("r", PROMPT, 60), arrived))
        await until_streaming([arrived])
        await client.pause("in_place")
        before = await client.checksum()
        await client.load_from_disk(model, PolicyVersion(1, 7))
        assert await client.checksum() != before
        assert await client.version() == (1, 7)
        await client.resume()
        return await running

    versions = [chunk.version for chunk in with_client(process, body)]
    assert versions[0] != (1, 7) and versions[-1] == (1, 7) and versions == sorted(versions)
    answer = call(weights, "POST", "weights_checker", {"action": "checksum"}, 5.0, "secret")
    assert list(answer["ranks"][0]["checksums"]) == parameter_names(model)


def test_an_aborted_request_ends_and_can_go_on(server: tuple[SGLangProcess, Path]) -> None:
    async def body(client: SGLangClient) -> tuple[list[TokenChunk], list[TokenChunk]]:
        arrived: list[TokenChunk] = []
        running = asyncio.create_task(collect(client, make_request("r", PROMPT, 500), arrived))
        await until_streaming([arrived])
        await client.abort(["r"])
        first = await running
        done = tokens_of(first).tolist()
        return first, await collect(client, make_request("r2", [*PROMPT, *done], 8))

    first, rest = with_client(server[0], body)
    assert first[-1].end == "abort" and len(tokens_of(first)) < 500
    assert len(tokens_of(rest)) == 8


def test_without_the_key_it_answers_nothing(server: tuple[SGLangProcess, Path]) -> None:
    keyless = SETTINGS.model_copy(update={"api_key": ""})

    async def body() -> None:
        with pytest.raises(EngineError, match="401"):
            await SGLangClient.connect("engine", server[0].url, keyless)

    asyncio.run(body())


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"weights": {"verify": "never"}}, "weights.transport tensor or disk, got distributed"),
        ({"weights": {"transport": "disk"}}, "weights.verify: never, got every"),
    ],
)
def test_settings_that_it_cannot_keep_are_refused(settings: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        build_config({"engines": {"kind": "simulated"}, **settings})


class Here:
    """A host in this process, called as one that is placed."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def call(self, what: Any, *, limit: float) -> Any:
        return await what(self._host)


def test_streams_through_the_engines_host_are_those_of_the_server(
    server: tuple[SGLangProcess, Path],
) -> None:
    """What the host does; `start` and `stop` have tests of their own."""
    process, model = server

    async def relayed() -> list[list[TokenChunk]]:
        config = build_config({"model": {"path": str(model)}})
        config = config.model_copy(update={"engines": SETTINGS})
        host = EngineHost("e", config, model / "log")
        await host.serve(process.url)
        placed: Any = Here(host)
        there = await SGLangClient.connect("e", process.url, SETTINGS)
        client = RelayedEngine(there, HostCalls(placed, "e", 10.0), Pace())
        long = asyncio.create_task(collect(client, make_request("long", PROMPT, 1900)))
        answers = await asyncio.gather(
            *(collect(client, make_request(f"r{i}", [*PROMPT, i], 50)) for i in range(8))
        )
        with pytest.raises(RequestRefused, match="r9"):
            await collect(client, make_request("r9", PROMPT, 10**7))
        await client.abort(["long"])
        assert (await long)[-1].end == "abort"
        await client.close()
        await host.stop()
        return answers

    found = asyncio.run(asyncio.wait_for(relayed(), 30))
    here = SimulatedEngine("here", engine_model(SETTINGS, model))
    for i, chunks in enumerate(found):
        wanted = asyncio.run(collect(here, make_request(f"r{i}", [*PROMPT, i], 50)))
        assert (tokens_of(chunks) == tokens_of(wanted)).all()
        assert (logprobs_of(chunks) == logprobs_of(wanted)).all()
