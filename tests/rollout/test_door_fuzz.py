"""Whatever an engine sends: the run goes on, and nothing impossible is stored.

A manager over engines behind SGLang's endpoints, of which each message may have one field changed
at random: tokens, loads, versions, checksums, answers to pauses. By hand, longer:

    MEGATRON_ASYNC_DOOR_FUZZ=10000 pytest --timeout 0 tests/rollout/test_door_fuzz.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from megatron_async.engines.interface import EngineError
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.engines.simulated.server import Handler, SimulatedServer
from megatron_async.errors import ProcessKilled
from megatron_async.rollout.manager import ResumePoint
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.possible import impossible_tokens
from megatron_async.trajectory.types import PolicyVersion
from tests.rollout.short_limits import config_of
from tests.rollout.stand_ins import Engines
from tests.rollout.test_manager import Trainer

MUTATIONS = int(os.environ.get("MEGATRON_ASYNC_DOOR_FUZZ", "200"))
SHARE = 0.03
MODEL = SimulatedEngineModel(mean_length=24, step_seconds=0.0005, stream_interval=4, vocab_size=128)
VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 3.7, 128, 10**9, 10**30, 5.0, 1e39, -1e39, -1e-300),
    *("", "y", "3", "0.9", [], {}, [[]], {"type": "stop"}, {"type": "length"}, {"type": "abort"}),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) below a JSON value."""
    keys = (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    for key in keys:
        yield value, key
        yield from places(value[key])


class Changer:
    """Changes a field of some messages, and counts."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.changes: Counter[str] = Counter()

    def __call__(self, path: str, data: bytes) -> bytes:
        """The message, with a small chance of one random change; any text without JSON too."""
        if self._random.random() >= SHARE or self.changes.total() >= MUTATIONS:
            return data
        self.changes[path] += 1
        try:
            content = json.loads(data)
        except ValueError:
            cut = self._random.randrange(len(data) + 1)
            return data[:cut] + self._random.choice([b"", b"y", b"\xff", b"-9"])
        found = list(places(content))
        if not found:
            return json.dumps(self._random.choice(VALUES)).encode()
        container, key = self._random.choice(found)
        old = container[key]
        if isinstance(old, int | float) and self._random.random() < 0.4:
            container[key] = old + self._random.choice([-1, 1, 0.5, 64, -0.25])
        elif self._random.random() < 0.2:
            del container[key]
        else:
            container[key] = self._random.choice(VALUES)
        return json.dumps(content).encode()


class ChangingServer(SimulatedServer):
    """A server whose messages may be changed on their way."""

    def __init__(self, change: Changer, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._change = change

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        answer = await super()._guarded(request, handler)
        if isinstance(answer, web.Response) and isinstance(answer.body, bytes):
            answer.body = self._change(request.path, answer.body)
        return answer

    async def _stream(
        self, request: web.Request, response: web.StreamResponse
    ) -> web.StreamResponse:
        change = self._change

        class Changed(web.StreamResponse):
            async def write(self, data: Any) -> None:
                head, body, tail = data[:6], data[6:-2], data[-2:]
                await super().write(head + change(request.path, bytes(body)) + tail)

        return await super()._stream(request, Changed(headers=response.headers))


class ChangingEngines(Engines):
    """Launches engines behind HTTP."""

    def __init__(self, change: Changer, config: Any) -> None:
        super().__init__()
        self._change, self._config = change, config
        self._runners: list[web.AppRunner] = []

    async def launch(self, index: int) -> Any:
        engine = SimulatedEngine(f"engine{index}.{len(self.all)}", MODEL)
        server = ChangingServer(self._change, engine, [], PolicyVersion(-1, 0), "")
        runner = web.AppRunner(server.application(), shutdown_timeout=0.1)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            client = await SGLangClient.connect(
                engine.engine_id, address, self._config.engines, MODEL.vocab_size
            )
        except EngineError as error:  # as RayEngineLauncher does
            raise ProcessKilled(str(error)) from error
        engine.served = server  # type: ignore[attr-defined]
        self.all.append(engine)
        return client

    async def alive(self, index: int) -> bool:
        return True

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


class ServedTrainer(Trainer):
    """Its weights reach the servers, which report their version."""

    async def publish(self, lineage: int, number: int) -> Any:
        for engine in self.engines.all:
            engine.served._version = PolicyVersion(lineage, number)
        return await super().publish(lineage, number)


@pytest.mark.timeout(0 if MUTATIONS > 200 else 300)
def test_no_changed_message_ends_a_run_or_leaves_what_cannot_be(tmp_path: Path) -> None:
    change = Changer(seed=MUTATIONS)
    config = config_of(
        "copris",
        count=3,
        engines={
            "max_restarts": 10**6,
            "no_progress_seconds": 1.0,
            "health_interval_seconds": 0.05,
        },
        schedule={"concurrency": 24, "group_size": 4, "groups_per_batch": 4},
        sampling={"max_new_tokens": 40},
        trainer={"wait_for_batch_seconds": 60.0},
        weights={"verify": "never"},
        steps=10**6,
    )
    warnings: Counter[str] = Counter()

    async def body() -> None:
        engines = ChangingEngines(change, config)
        trainer = ServedTrainer(tmp_path, config, None, engines)
        await trainer.manager.start()
        await trainer.begin(ResumePoint(0))
        step = 0
        while change.changes.total() < MUTATIONS:
            batch = await trainer.manager.next_batch(0)
            if batch is not None:
                assert batch.step == step
                step += 1
            report = await trainer.publish(0, step)
            warnings.update(name for name, _ in report.warnings)
        await trainer.manager.stop()
        await engines.close()

    asyncio.run(asyncio.wait_for(body(), max(240, MUTATIONS)))
    dropped = 0
    with closing(StoreReader(tmp_path / "store.sqlite")) as reader:
        for entry in reader.summaries():
            trajectory = reader.trajectory(entry.trajectory_id)
            dropped += trajectory.drop_reason is not None
            for segment in trajectory.segments:
                found = impossible_tokens(segment.token_ids, segment.logprobs, MODEL.vocab_size)
                assert found is None, (entry.trajectory_id, found)
            stops = [2 in segment.token_ids[:-1] for segment in trajectory.segments]
            assert not any(stops), entry.trajectory_id
    assert dropped <= MUTATIONS
    print(dict(change.changes), dict(warnings), f"{dropped} dropped")
