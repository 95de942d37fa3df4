"""Tests that no healthy engine is taken out of service, and that an engine which replies but does
not work is.

Healthy engines are idle, paused, refuse requests or generate long responses; the run continues with
them. Each test has a complete manager over simulated engines, with limits of about a second instead
of minutes.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from megatron_async.engines.interface import (
    EngineClient,
    EngineError,
    GenerationRequest,
    TokenChunk,
)
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.engines.simulated.server import SimulatedServer
from megatron_async.errors import ComponentFailure
from megatron_async.rollout.manager import ResumePoint
from megatron_async.trajectory.types import PolicyVersion, Prompt
from tests.rollout.short_limits import HANG_SECONDS, ModelEngines, config_of, in_service, trainer_of
from tests.rollout.stand_ins import Engines, Fixed


@pytest.mark.parametrize("preset", ["copris", "sync"])
async def test_engines_stay_in_service_when_they_were_idle_during_training(
    tmp_path: Path, preset: str
) -> None:
    model = SimulatedEngineModel(mean_length=12, step_seconds=0.03, stream_interval=16)
    trainer = await trainer_of(tmp_path, config_of(preset), ModelEngines(model)).started()
    await trainer.batch()
    # There is no request meanwhile, and the first chunk takes 0.5 s.
    await asyncio.sleep(1.5 * HANG_SECONDS)
    await trainer.publish(0, 1)
    await trainer.batch()
    assert in_service(trainer) == (2, {})
    await trainer.manager.stop()


class Unanswering(SimulatedEngine):
    """Simulated engine that does not reply to load polls while it receives weights."""

    receiving = False

    async def status(self) -> Any:
        while self.receiving:
            await asyncio.sleep(0.01)
        return await super().status()


@pytest.mark.parametrize("preset", ["pipeline", "copris"])
async def test_engines_stay_in_service_when_they_receive_weights_slowly(
    tmp_path: Path, preset: str
) -> None:
    model = SimulatedEngineModel(mean_length=200, step_seconds=0.002, stream_interval=4)
    config = config_of(preset, weights={"timeout_seconds": 30.0})
    trainer = await trainer_of(tmp_path, config, ModelEngines(model, Unanswering)).started()
    await trainer.batch()
    addresses = await trainer.manager.begin_update(0, 1)
    for engine in trainer.engines.all:
        engine.receiving = True
    await asyncio.sleep(2 * HANG_SECONDS)
    for engine in trainer.engines.all:
        engine.receiving = False
        engine.set_weights(PolicyVersion(0, 1))
    await trainer.manager.end_update(0, 1, [a.engine_id for a in addresses], False)
    await trainer.manager.verify_update(0, 1, None, False)
    assert (await trainer.batch()).step == 1
    assert in_service(trainer) == (2, {})
    await trainer.manager.stop()


class Endless(SimulatedEngine):
    """Simulated engine on which members of a group have different lengths, so that some still run
    when one has its reward."""

    def _advance(self, running: Any) -> Any:
        super()._advance(running)
        number = int(running.request.request_id.split("-")[0][1:])
        return "stop" if running.length >= 20 + 200 * (number % 4) else None


class Failing(Fixed):
    """Scorer whose scores wait and then fail while `fail` is true."""

    def __init__(self) -> None:
        self.fail = False
        self.waiting = 0
        self.proceed = asyncio.Event()

    async def score(self, prompt: Prompt, response_ids: Any) -> Any:
        if not self.fail:
            return 1.0, {}
        self.waiting += 1
        await self.proceed.wait()
        return None, {}


async def test_engine_stays_in_service_when_it_ends_no_request_during_a_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group is dropped during a long weight transfer. SGLang ends the requests of that group only
    after the pause."""
    monkeypatch.setattr("megatron_async.rollout.generation._ABORT_WAIT_SECONDS", 0.05)

    model = SimulatedEngineModel(mean_length=10**9, step_seconds=0.002, stream_interval=4)
    config = config_of(
        "pipeline",
        count=1,
        schedule={"concurrency": 8, "group_size": 4},
        task={"on_scorer_timeout": "drop"},
    )
    task = Failing()
    trainer = await trainer_of(tmp_path, config, ModelEngines(model, Endless), task).started()
    await trainer.batch()
    task.fail = True
    while task.waiting < 2:
        await asyncio.sleep(0.005)
    addresses = await trainer.manager.begin_update(0, 1)
    task.proceed.set()
    task.fail = False
    await asyncio.sleep(1.0)  # Ten tries of an abort take half of this time.
    generation = trainer.manager._driver._generation
    assert any(request.abort_wanted for request in generation._requests.values())
    trainer.engines.all[0].set_weights(PolicyVersion(0, 1))
    await trainer.manager.end_update(0, 1, [a.engine_id for a in addresses], False)
    await trainer.manager.verify_update(0, 1, None, False)
    async with asyncio.timeout(5):
        while any(request.abort_wanted for request in generation._requests.values()):
            await asyncio.sleep(0.01)
    assert in_service(trainer) == (1, {})
    await trainer.manager.stop()


async def test_engine_stays_in_service_when_streams_outlast_the_hang_timeout(
    tmp_path: Path,
) -> None:
    """The engine is used over HTTP. Every stream lasts three times as long as the permitted
    silence."""

    class Served(Engines):
        async def launch(self, index: int) -> Any:
            model = SimulatedEngineModel(
                mean_length=10**9, step_seconds=0.01, stream_interval=16, vocab_size=128
            )
            self.all.append(SimulatedEngine("server", model))
            server = SimulatedServer(self.all[-1], [], PolicyVersion(-1, 0), "")
            runner = web.AppRunner(server.application())
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
            self.runner = runner
            return await SGLangClient.connect("engine0", f"http://127.0.0.1:{port}", config.engines)

        async def alive(self, index: int) -> bool:
            return True

    config = config_of(
        "sync",
        count=1,
        sampling={"max_new_tokens": 300},
        trainer={"wait_for_batch_seconds": 25.0},
        schedule={"concurrency": 8, "group_size": 4, "groups_per_batch": 2},
    )

    engines = Served()
    trainer = await trainer_of(tmp_path, config, engines).started()
    batch = await trainer.batch()
    assert batch.truncated_S.all() and not batch.resumed_S.any()
    assert in_service(trainer) == (1, {})
    await trainer.manager.stop()
    await engines.runner.cleanup()


async def test_run_ends_and_engine_is_kept_when_open_files_are_exhausted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the limit of open files the run ends with a remedy, and the engine stays in service."""
    config = config_of("copris", count=1)
    client = SGLangClient("engine0", "http://127.0.0.1:9", config.engines)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    class Remote(Engines):
        async def launch(self, index: int) -> Any:
            return client

        async def alive(self, index: int) -> bool:
            return True

    trainer = trainer_of(tmp_path, config, Remote())
    await trainer.manager.start()
    await trainer.manager.attach(ResumePoint(0))
    driver = trainer.manager._driver
    await driver.begin_update(PolicyVersion(0, 0))
    monkeypatch.setattr(client._session, "request", full)
    driver.end_update(PolicyVersion(0, 0), ["engine0"])
    with pytest.raises(ComponentFailure, match=r"cannot open more connections .*ulimit -n"):
        await driver.next_batch(5.0)
    assert in_service(trainer) == (1, {})
    await trainer.manager.stop()


async def test_update_waits_when_a_response_outlasts_the_transfer_timeout(tmp_path: Path) -> None:
    """With `drain` an update waits as long as for a batch, whatever `weights.timeout_seconds`
    allows for a transfer."""
    model = SimulatedEngineModel(mean_length=10**9, step_seconds=0.01, stream_interval=4)
    config = config_of(
        "sync",
        count=1,
        weights={"timeout_seconds": 0.2},
        experiment={"forced_lengths": [4, 4, 100, 100]},
        schedule={"overlap": True, "refill": "continuous", "max_async_level": 4},
    )
    trainer = await trainer_of(tmp_path, config, ModelEngines(model)).started()
    await trainer.batch()
    await trainer.publish(0, 1)
    assert in_service(trainer)[0] == 1
    await trainer.manager.stop()


async def test_engine_stays_in_service_when_streams_break_and_it_replies(tmp_path: Path) -> None:
    """A reset connection does not show that the engine is at fault. The engine is then asked for
    its version."""

    class Dropping(SimulatedEngine):
        requests = 0

        async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
            type(self).requests += 1
            broken = self.requests % 5 == 0
            async for chunk in super().generate(request):
                yield chunk
                if broken:
                    raise EngineError(f"{self.engine_id}: the stream broke off")

    model = SimulatedEngineModel(mean_length=30, step_seconds=0.002, stream_interval=4)
    trainer = await trainer_of(
        tmp_path, config_of("async", count=1), ModelEngines(model, Dropping)
    ).started()
    for step in range(8):
        await trainer.batch()
        await trainer.publish(0, step + 1)
    up, warnings = in_service(trainer)
    assert up == 1 and "engine_suspect" in warnings and "engine_failed" not in warnings
    await trainer.manager.stop()


async def test_failed_engine_is_removed_when_another_engine_has_not_replied(
    tmp_path: Path,
) -> None:
    trainer = await trainer_of(tmp_path, config_of("copris", count=2), Engines()).started()
    driver = trainer.manager._driver
    answered = asyncio.Event()

    async def what(engine: EngineClient) -> None:
        if engine.engine_id == "engine0":
            raise EngineError("it refuses")
        await answered.wait()

    asking = asyncio.create_task(driver.ask(driver.engines(), what))
    await asyncio.sleep(0.1)
    assert in_service(trainer)[0] == 1 and not asking.done()
    answered.set()
    await asking
    await trainer.manager.stop()


NO_TOKENS = (np.zeros(0, np.int32), np.zeros(0, np.float32))
MODEL = SimulatedEngineModel(mean_length=12, step_seconds=0.02, stream_interval=4)


class Malfunctioning(SimulatedEngine):
    """Simulated engine that can send unreadable load reports, abort requests by itself, or stop
    sending tokens."""

    unreadable = silent = aborts = False

    async def status(self) -> Any:
        if self.unreadable:
            raise EngineError(f"{self.engine_id}: its load report is invalid: KeyError: 'loads'")
        return await super().status()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        if self.aborts:
            await asyncio.sleep(0.005)
            yield TokenChunk(*NO_TOKENS, await self.version(), "abort")
            return
        async for chunk in super().generate(request):
            while self.silent:
                await asyncio.sleep(0.01)
            yield chunk


@pytest.mark.parametrize(
    ("malfunction", "why"),
    [
        ({"unreadable": True}, "sent no readable load report for"),
        ({"unreadable": True, "silent": True}, "engine0.0 "),
        ({"aborts": True}, "made no token for"),
    ],
)
async def test_engine_is_removed_when_it_replies_but_does_not_work(
    tmp_path: Path, malfunction: dict[str, bool], why: str
) -> None:
    config = config_of("copris", schedule={"groups_per_batch": 8})  # A step takes seconds.
    trainer = await trainer_of(tmp_path, config, ModelEngines(MODEL, Malfunctioning)).started()
    await trainer.batch()
    for name, value in malfunction.items():
        setattr(trainer.engines.all[0], name, value)
    step = 0
    while in_service(trainer)[0] == 2:
        step += 1
        await trainer.publish(0, step)
        await trainer.batch()
    assert why in in_service(trainer)[1]["engine_failed"]
    await trainer.publish(0, step + 1)
    assert (await trainer.batch()).step == step + 1
    await trainer.manager.stop()
