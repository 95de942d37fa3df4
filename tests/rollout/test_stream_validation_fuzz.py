"""Tests that the run continues and no invalid token is stored, whatever an engine sends.

A manager and a sender of weights use engines behind SGLang's endpoints. Each message of an engine
may have one field changed at random: tokens, loads, versions, limits, checksums, and the replies to
aborts, pauses and updates. A longer test, to be run by hand:

    MEGATRON_ASYNC_STREAM_FUZZ=10000 pytest --timeout 0 tests/rollout/test_stream_validation_fuzz.py
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
import torch
from aiohttp import web

from megatron_async.config import RunConfig
from megatron_async.engines.interface import EngineError
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.simulated.engine import SimulatedEngine, SimulatedEngineModel
from megatron_async.engines.simulated.server import Handler, SimulatedServer
from megatron_async.errors import ProcessKilled
from megatron_async.rollout.manager import ResumePoint, UpdateReport
from megatron_async.store.reader import StoreReader
from megatron_async.store.store import TrajectoryStore
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.token_checks import find_invalid_token
from megatron_async.trajectory.types import DropReason, PolicyVersion, Trajectory
from megatron_async.weight_sync.http import EngineAddress, EngineCallError
from megatron_async.weight_sync.transports.disk import DiskSender
from tests.rollout.short_limits import config_of
from tests.rollout.stand_ins import Engines, trainer_logprobs
from tests.rollout.test_manager import Trainer

# `copris` aborts requests at a boundary; `pipeline` pauses engines for an update.
PRESETS = ("copris", "pipeline")
MUTATIONS = int(os.environ.get("MEGATRON_ASYNC_STREAM_FUZZ", "200")) // len(PRESETS)
SHARE, SHARE_OF_NEW = 0.02, 0.3
NAMES = ["embed.weight", "head.weight"]
MODEL = SimulatedEngineModel(mean_length=24, step_seconds=0.0005, stream_interval=4, vocab_size=128)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -1,
    0,
    1,
    3.7,
    128,
    10**9,
    10**30,
    5.0,
    1e39,
    -1e39,
    -1e-300,
    "",
    "y",
    "3",
    "0.9",
    [],
    {},
    [[]],
    {"type": "stop"},
    {"type": "length"},
    {"type": "abort"},
)


def fields(value: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name, container and key of every field below a JSON value, also within lists."""
    if isinstance(value, dict):
        keys = [(key, f"{name}.{key}") for key in value]
    else:
        keys = [(i, f"{name}[]") for i in range(len(value))] if isinstance(value, list) else []
    for key, below in keys:
        yield below, value, key
        yield from fields(value[key], below)


class Changer:
    """Changes one field of some messages, preferably a field that it has not changed yet, and
    counts the changes.

    A field's name starts with the path of its message. A text that is not JSON counts as one field.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.seen: set[str] = set()
        self.changes: Counter[str] = Counter()

    @property
    def incomplete(self) -> bool:
        """Whether more changes are needed: there were too few, or some field was never changed."""
        return self.changes.total() < MUTATIONS or not self.seen <= self.changes.keys()

    def of(self, path: str) -> int:
        """Return the number of changed messages of this path."""
        return sum(n for name, n in self.changes.items() if name.partition(" ")[0] == path)

    def __call__(self, path: str, data: bytes) -> bytes:
        """Return the message, possibly with one change."""
        try:
            whole = [json.loads(data)]
        except ValueError:
            found: list[tuple[str, Any, Any]] = [(f"{path} (text)", None, None)]
        else:
            found = [(f"{path} ", whole, 0), *fields(whole[0], f"{path} ")]
        names = {name for name, _, _ in found}
        self.seen |= names
        new = names - self.changes.keys()
        if self._random.random() >= (SHARE_OF_NEW if new else SHARE) or not self.incomplete:
            return data
        name = self._random.choice(sorted(new or names))
        self.changes[name] += 1
        container, key = self._random.choice([(c, k) for n, c, k in found if n == name])
        if container is None:
            cut = self._random.randrange(len(data) + 1)
            return data[:cut] + self._random.choice([b"", b"y", b"\xff", b"-9"])
        old = container[key]
        if isinstance(old, int | float) and self._random.random() < 0.4:
            container[key] = old + self._random.choice([-1, 1, 0.5, 64, -0.25])
        elif container is whole and self._random.random() < 0.2:
            return b"[" * 100_000
        elif container is not whole and self._random.random() < 0.2:
            del container[key]
        else:
            container[key] = self._random.choice(VALUES)
        return json.dumps(whole[0]).encode()


class ChangingServer(SimulatedServer):
    """Server whose messages may be changed before they are sent."""

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
    """Launcher of simulated engines behind HTTP servers that may change messages."""

    def __init__(self, change: Changer, config: Any) -> None:
        super().__init__()
        self._change, self._config = change, config
        self._runners: list[web.AppRunner] = []

    async def launch(self, index: int) -> Any:
        engine = SimulatedEngine(f"engine{index}.{len(self.all)}", MODEL)
        server = ChangingServer(self._change, engine, NAMES, PolicyVersion(-1, 0), "")
        runner = web.AppRunner(server.application(), shutdown_timeout=0.1)
        await runner.setup()
        self._runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            client = await SGLangClient.connect(
                engine.engine_id, address, self._config.engines, MODEL.vocab_size
            )
        except EngineError as error:  # `HostedEngines` converts the error in the same way.
            raise ProcessKilled(str(error)) from error
        self.all.append(engine)
        return client

    async def alive(self, index: int) -> bool:
        return True

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()


class SendingTrainer(Trainer):
    """Trainer that sends weights through files and computes the log-probs that the manager asks
    for."""

    def __init__(self, folder: Path, config: RunConfig, engines: ChangingEngines) -> None:
        super().__init__(folder, config, None, engines)
        self.sender = DiskSender(config.weights, config.engines, folder / "weights")

    async def publish(self, lineage: int, number: int) -> UpdateReport:
        self.lineage = lineage
        receivers = await self.manager.begin_update(lineage, number)
        while receivers:  # `WeightPublisher` repeats an update in the same way.
            try:
                await asyncio.to_thread(self._send, receivers, PolicyVersion(lineage, number))
                break
            except EngineCallError as error:
                receivers = [
                    engine for engine in receivers if engine.engine_id not in error.engine_ids
                ]
        ids = [engine.engine_id for engine in receivers]
        await self.manager.end_update(lineage, number, ids, True)
        batch = await self.manager.verification_samples(lineage, number)
        logprobs = None if batch is None else trainer_logprobs(batch)
        return await self.manager.verify_update(lineage, number, logprobs, True)

    def _send(self, engines: list[EngineAddress], version: PolicyVersion) -> None:
        self.sender.connect(engines)
        self.sender.send(
            [[(name, torch.full((2,), float(version.number)))] for name in NAMES], version
        )


def stored(file: Path) -> list[Trajectory]:
    """Return every trajectory of a store."""

    async def load() -> list[Trajectory]:
        with closing(StoreReader(file)) as reader:
            ids = [entry.trajectory_id for entry in reader.summaries()]
        store = TrajectoryStore.open(file, lineage=1)
        try:
            return [store.load_trajectory(trajectory_id) for trajectory_id in ids]
        finally:
            await store.close()

    return asyncio.run(load())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.timeout(0 if MUTATIONS > 200 else 300)
def test_run_continues_and_stores_only_valid_tokens_when_messages_are_corrupt(
    tmp_path: Path, preset: str
) -> None:
    change = Changer(seed=MUTATIONS)
    config = config_of(
        preset,
        count=3,
        engines={
            "max_restarts": 10**6,
            "hang_timeout_seconds": 1.0,
        },
        schedule={"concurrency": 24, "group_size": 4, "groups_per_batch": 4},
        sampling={"max_new_tokens": 40},
        trainer={"wait_for_batch_seconds": 60.0},
        steps=10**6,
    )
    warnings: Counter[str] = Counter()
    sent = {PolicyVersion(0, 0)}

    async def body() -> None:
        engines = ChangingEngines(change, config)
        trainer = SendingTrainer(tmp_path, config, engines)
        await trainer.manager.start()
        await trainer.begin(ResumePoint(0))
        step = 0
        while change.incomplete:
            batch = await trainer.manager.next_batch(0)
            if isinstance(batch, TokenBatch):
                assert batch.step == step
                step += 1
            sent.add(PolicyVersion(0, step))
            report = await trainer.publish(0, step)
            warnings.update(name for name, _ in report.warnings)
        trainer.sender.close()
        await trainer.manager.stop()
        await engines.close()

    asyncio.run(asyncio.wait_for(body(), max(240, MUTATIONS)))
    kept, dropped = [], 0
    for trajectory in stored(tmp_path / "store.sqlite"):
        kept.append(trajectory.trajectory_id)
        if trajectory.drop_reason in (DropReason.NONFINITE, DropReason.REFUSED):
            dropped += 1
        for segment in trajectory.segments:
            found = find_invalid_token(segment.token_ids, segment.logprobs, MODEL.vocab_size)
            assert found is None, (trajectory.trajectory_id, found)
            assert segment.version in sent, trajectory.trajectory_id
        stops = [2 in segment.token_ids[:-1] for segment in trajectory.segments]
        assert not any(stops), trajectory.trajectory_id
    assert sorted(kept) == list(range(len(kept))), "a trajectory is lost"
    assert dropped <= change.of("/generate"), "a change dropped more than its own trajectory"
    paths = {name.partition(" ")[0] for name in change.changes}
    print(f"{len(change.changes)} fields,", {path: change.of(path) for path in sorted(paths)})
    print(dict(warnings), f"{dropped} of {len(kept)} trajectories dropped")
