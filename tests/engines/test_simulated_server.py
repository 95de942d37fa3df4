"""Tests the simulated engine and its server, which a client, a host and the trainer use like a real
engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_async.config import build_config
from megatron_async.config.rollout import EngineConfig, SimulatedEngineConfig
from megatron_async.engines.host import EngineHost, HostCalls, HostedEngines
from megatron_async.engines.interface import EngineError, RequestRefused, TokenChunk
from megatron_async.engines.relay import Pace, RelayedEngine
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.engines.simulated.server import engine_model, parameter_names
from megatron_async.errors import UserError
from megatron_async.process_backends.local import local_backend
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineAddress, call
from tests.crash.run import configuration, prepare
from tests.engine import collect, crash_after, logprobs_of, make_request, tokens_of, until_streaming
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


def test_client_stream_raises_when_the_client_is_closed(
    server: tuple[SGLangProcess, Path],
) -> None:
    async def body(client: SGLangClient) -> None:
        reading = asyncio.create_task(collect(client, make_request("long", PROMPT, 1900)))
        await asyncio.sleep(0.3)
        await client.close()
        with pytest.raises(EngineError, match="the client has been closed"):
            await asyncio.wait_for(reading, 5)

    with_client(server[0], body)


def test_client_uses_abort_all_only_when_every_request_is_aborted(
    server: tuple[SGLangProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(client: SGLangClient) -> list[list[TokenChunk]]:
        posted: list[Any] = []
        post = client._post

        async def recording_post(path: str, sent: Any) -> Any:
            posted.append(sent)
            return await post(path, sent)

        monkeypatch.setattr(client, "_post", recording_post)
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


def test_client_repeats_abort_only_when_no_token_of_the_request_has_arrived(
    server: tuple[SGLangProcess, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The abort of a request without tokens may have arrived at the engine before the request. An
    engine that has sent tokens of a request knows the request, and has handled the abort."""
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
        arrived: list[TokenChunk] = []
        running = asyncio.create_task(
            collect(client, make_request("known", PROMPT, 60_000), arrived)
        )
        await until_streaming([arrived])
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


def test_simulated_server_gives_each_token_the_version_that_generated_it(
    server: tuple[SGLangProcess, Path],
) -> None:
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


async def test_simulated_server_rejects_client_without_the_api_key(
    server: tuple[SGLangProcess, Path],
) -> None:
    keyless = SETTINGS.model_copy(update={"api_key": ""})
    with pytest.raises(EngineError, match="401"):
        await SGLangClient.connect("engine", server[0].url, keyless)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"weights": {"verify": "never"}}, "weights.transport tensor or disk, got distributed"),
        ({"weights": {"transport": "disk"}}, "weights.verify is every; .* weights.verify: never"),
    ],
)
def test_config_refuses_weight_settings_that_simulated_engines_lack(
    settings: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        build_config({"engines": {"kind": "simulated"}, **settings})


class LocalHost:
    """A host in this process with the interface of a remote object."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def call(self, what: Any, *, limit: float) -> Any:
        return await what(self._host)


def test_streams_through_the_engine_host_equal_the_servers_streams(
    server: tuple[SGLangProcess, Path],
) -> None:
    """The test covers the host's streams; other tests cover `start` and `stop`."""
    process, model = server

    async def relayed() -> list[list[TokenChunk]]:
        config = build_config({"model": {"path": str(model)}})
        config = config.model_copy(update={"engines": SETTINGS})
        host = EngineHost("e", config, model / "log")
        await host.serve(process.url)
        remote: Any = LocalHost(host)
        direct_client = await SGLangClient.connect("e", process.url, SETTINGS)
        client = RelayedEngine(direct_client, HostCalls(remote, "e", 10.0), Pace())
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
    local_engine = SimulatedEngine("local", engine_model(SETTINGS, model))
    for i, chunks in enumerate(found):
        expected = asyncio.run(collect(local_engine, make_request(f"r{i}", [*PROMPT, i], 50)))
        assert (tokens_of(chunks) == tokens_of(expected)).all()
        assert (logprobs_of(chunks) == logprobs_of(expected)).all()


def test_launch_uses_the_engine_that_begin_started(tmp_path: Path) -> None:
    prepare(tmp_path)
    config = build_config(configuration("copris", "simulated", tmp_path, "run", {}))

    async def launched() -> list[str]:
        launcher = HostedEngines(config, tmp_path, backend)
        launcher.begin()
        clients = [await launcher.launch(index) for index in (0, 1, 0)]
        assert await launcher.alive(0) and await launcher.alive(1)
        await asyncio.gather(launcher.stop(0), launcher.stop(1))
        return [client.engine_id for client in clients]

    with local_backend(tmp_path) as backend:
        found = asyncio.run(asyncio.wait_for(launched(), 240))
    assert found == ["engine0", "engine1", "engine0.1"]


SLOW = SimulatedEngineModel(step_seconds=0.002, stream_interval=4)


async def test_resumed_response_equals_the_uninterrupted_response() -> None:
    engine = SimulatedEngine("one", SLOW)
    whole = await collect(engine, make_request("whole", PROMPT, 60))
    task = asyncio.create_task(collect(engine, make_request("cut", PROMPT, 60)))
    await asyncio.sleep(0.05)
    await engine.abort(["cut", "unknown"])
    first = tokens_of(await task).tolist()
    engine.set_weights(PolicyVersion(0, 1))
    rest = make_request("cut", [*PROMPT, *first], 60 - len(first))
    second = tokens_of(await collect(engine, rest)).tolist()
    await engine.close()
    assert 0 < len(first) < 60
    assert first + second == tokens_of(whole).tolist()


async def test_simulated_engine_fails_streams_and_calls_from_crash_until_restart() -> None:
    engine = SimulatedEngine("one", SLOW)
    crash_after(engine, 50)
    tasks = [
        asyncio.create_task(collect(engine, make_request(f"r{i}", PROMPT, 100))) for i in range(4)
    ]
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, EngineError) for result in results)
    assert engine.tokens_generated == 50
    assert engine._crash_reason
    with pytest.raises(EngineError, match="one: version: the engine died"):
        await engine.version()
    engine.restart(PolicyVersion(1, 0))
    assert len(tokens_of(await collect(engine, make_request("r", PROMPT, 5)))) == 5
    await engine.close()


async def test_simulated_engine_preempts_without_losing_tokens_when_cache_is_full() -> None:
    found, preemptions = [], []
    for capacity in (1000, 100):
        model = SimulatedEngineModel(step_seconds=0.0005, kv_capacity_tokens=capacity)
        engine = SimulatedEngine("one", model)
        requests = [make_request(f"r{i}", [i + 1], 40) for i in range(4)]
        chunks = await asyncio.gather(*(collect(engine, request) for request in requests))
        found.append([tokens_of(response).tolist() for response in chunks])
        preemptions.append((await engine.status()).preemptions_total)
        await engine.close()
    assert found[0] == found[1] and preemptions[0] == 0 < preemptions[1]
