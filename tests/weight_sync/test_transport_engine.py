"""Tests each transport with a real SGLang server: after an update the engine has loaded exactly the
sent weights."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_async.config.rollout import WeightsConfig
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.http import EngineCallError
from megatron_async.weight_sync.publisher import make_sender
from megatron_async.weight_sync.transports.base import WeightSender
from megatron_async.weight_sync.transports.delta import rounded
from megatron_async.weight_sync.transports.distributed import DistributedSender
from tests.engine import (
    SETTINGS,
    EngineUnderTest,
    collect,
    make_request,
    reference_logprobs,
    until_streaming,
)
from tests.weight_sync.published import publish

pytestmark = [pytest.mark.engine, pytest.mark.slow]

OLD, NEW = PolicyVersion(1, 4), PolicyVersion(1, 5)
TRANSPORTS = ["distributed", "tensor", "disk"]


@pytest.fixture
def engine(sglang_engine: EngineUnderTest) -> EngineUnderTest:
    sglang_engine.reset_to("a", OLD)
    return sglang_engine


def _sender(transport: Any, folder: Path) -> WeightSender:
    settings = WeightsConfig(transport=transport, timeout_seconds=30.0)
    return make_sender(settings, SETTINGS, torch.device("cpu"), folder)


def _buckets(engine: EngineUnderTest, model: str) -> list[list[tuple[str, torch.Tensor]]]:
    """Return the model's tensors in buckets of five, so that Q, K, V, gate and up of a layer are in
    different buckets."""
    tensors = engine.tensors(model)
    return [tensors[start : start + 5] for start in range(0, len(tensors), 5)]


def _send(
    engine: EngineUnderTest, sender: WeightSender, model: str, version: Any, noise: float = 0.0
) -> Any:
    engine.post("pause_generation", {"mode": "retract"})
    try:
        return sender.send((_with_noise(b, noise) for b in _buckets(engine, model)), version)
    finally:
        engine.post("continue_generation", {"torch_empty_cache": False})


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_transport_gives_the_checksum_of_the_same_weights_loaded_from_disk(
    engine: EngineUnderTest, transport: str, tmp_path: Path
) -> None:
    a = engine.checksum()
    engine.load("b", NEW)
    b = engine.checksum()
    engine.load("a", OLD)
    assert (engine.checksum() == a) and a != b

    sender = _sender(transport, tmp_path)
    sender.connect([engine.address])
    report = _send(engine, sender, "b", NEW)
    assert engine.checksum() == b
    assert engine.run(lambda client: client.version()) == NEW
    assert report.tensors == len(engine.tensors("b"))
    assert report.bytes == sum(tensor.nbytes for _, tensor in engine.tensors("b"))

    # Repeat the update over the same connection, and over a new one, as after an engine's restart.
    _send(engine, sender, "a", PolicyVersion(1, 6))
    assert engine.checksum() == a
    sender.disconnect()
    sender.connect([engine.address])
    _send(engine, sender, "b", PolicyVersion(1, 7))
    assert engine.checksum() == b
    sender.close()


@pytest.mark.parametrize("transport", ["distributed", "tensor"])
def test_running_requests_use_the_new_weights_from_the_reported_token(
    engine: EngineUnderTest, transport: str, tmp_path: Path
) -> None:
    sender = _sender(transport, tmp_path)
    sender.connect([engine.address])

    async def check(client: SGLangClient) -> list[Any]:
        arrived: list[list[Any]] = [[] for _ in range(4)]
        tasks = [
            asyncio.create_task(collect(client, make_request(f"r{i}", [5, 9, i], 120), into))
            for i, into in enumerate(arrived)
        ]
        await until_streaming(arrived)
        await asyncio.to_thread(_send, engine, sender, "b", NEW)
        return await asyncio.gather(*tasks)

    crossed = 0
    for index, chunks in enumerate(engine.run(check)):
        versions = [chunk.version for chunk in chunks for _ in chunk.token_ids]
        ids = [5, 9, index, *(int(t) for chunk in chunks for t in chunk.token_ids)]
        got = np.concatenate([chunk.logprobs for chunk in chunks])
        trainer = reference_logprobs(engine.models["a"], ids)[2:]
        new = reference_logprobs(engine.models["b"], ids)[2:]
        expected = np.where([version == OLD for version in versions], trainer, new)
        assert np.abs(got - expected).max() < 1e-3
        if len(set(versions)) == 2:
            crossed += 1
    assert crossed > 0, "no response has tokens of both versions: the update came too late"
    sender.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_update_with_an_unknown_name_raises_and_the_next_update_succeeds(
    engine: EngineUnderTest, transport: str, tmp_path: Path
) -> None:
    """SGLang itself replies with status 200 to a name that it does not know."""
    sender = _sender(transport, tmp_path)
    sender.connect([engine.address])
    tensors = engine.tensors("b")
    name, tensor = tensors[5]
    wrong = [*tensors[:5], (name.replace("layers.", "layer."), tensor), *tensors[6:]]
    with pytest.raises(ComponentFailure, match="have no parameter for"):
        sender.send(iter([wrong[:4], wrong[4:]]), NEW)
    assert engine.run(lambda client: client.version()) == OLD
    sender.connect([engine.address])
    _send(engine, sender, "b", NEW)
    sent = engine.checksum()
    engine.load("b", NEW)
    assert engine.checksum() == sent
    sender.close()


def _rounded_on_disk(engine: EngineUnderTest, model: str, folder: Path, noise: float) -> str:
    """Publish the model, rounded to bfloat16, to disk; return the checksum after SGLang has loaded
    the files itself."""
    buckets = [_with_noise(bucket, noise) for bucket in _buckets(engine, model)]
    path = publish((rounded(bucket) for bucket in buckets), OLD, folder / "by-disk")
    engine.post("update_weights_from_disk", {"model_path": str(path), "weight_version": str(OLD)})
    return engine.checksum()


def _with_noise(bucket: list[tuple[str, torch.Tensor]], noise: float) -> Any:
    if noise == 0.0:
        return bucket
    generator = torch.Generator().manual_seed(7)
    return [(n, t + noise * torch.randn(t.shape, generator=generator)) for n, t in bucket]


def test_engine_is_usable_after_an_update_that_broke_off(
    engine: EngineUnderTest, tmp_path: Path
) -> None:
    """The engine has been told of a bucket that is never sent, and has already posted its
    receive."""
    sender = _sender("distributed", tmp_path)
    sender.connect([engine.address])
    buckets = _buckets(engine, "b")

    def breaks_off() -> Iterator[Any]:
        yield from buckets[:3]
        raise ValueError("a rank died")

    engine.post("pause_generation", {"mode": "retract"})
    started = time.monotonic()
    with pytest.raises(ValueError, match="a rank died"):
        sender.send(breaks_off(), NEW)
    engine.post("continue_generation", {"torch_empty_cache": False})
    sender.connect([engine.address])
    _send(engine, sender, "b", NEW)
    assert time.monotonic() - started < 10
    updated = engine.checksum()
    sender.close()
    engine.load("b", NEW)
    assert engine.checksum() == updated


class KilledSender(DistributedSender):
    """A sender whose process is killed: its connections close, and engines receive no other
    notice."""

    def close(self) -> None:
        assert self._link is not None
        self.group_name = self._link.name
        self._link.drop()

    def _abandon(self) -> None:
        self.close()


def test_engine_ends_groups_of_killed_trainers_when_an_update_starts(
    engine: EngineUnderTest, tmp_path: Path
) -> None:
    """One trainer was killed between updates and one during an update; afterward torch in the
    engine must not have the group of either."""
    settings = WeightsConfig(timeout_seconds=30.0)
    killed = [KilledSender(settings, SETTINGS, torch.device("cpu")) for _ in range(2)]
    killed[0].connect([engine.address])
    _send(engine, killed[0], "b", NEW)
    killed[0].close()
    killed[1].connect([engine.address])
    with pytest.raises(ComponentFailure, match="have no parameter for"):
        killed[1].send([*_buckets(engine, "b")[:3], [("nobody", torch.zeros(1))]], NEW)

    def create_group(sender: KilledSender) -> dict[str, Any]:
        """Create a group with the sender's group name on the engine; torch refuses a name that is
        in use."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 0}
        body |= {"world_size": 1, "group_name": sender.group_name, "backend": "gloo"}
        return engine.post("init_weights_update_group", body)

    with pytest.raises(EngineCallError, match="already"):
        create_group(killed[0])
    sender = _sender("distributed", tmp_path)
    sender.connect([engine.address])
    for _ in range(2):
        _send(engine, sender, "a", OLD)
    for trainer in killed:
        create_group(trainer)
        engine.post("destroy_weights_update_group", {"group_name": trainer.group_name})
    _send(engine, sender, "b", NEW)
    updated = engine.checksum()
    sender.close()
    engine.load("b", NEW)
    assert engine.checksum() == updated


def test_delta_update_is_small_and_gives_the_checksum_of_rounded_weights(
    engine: EngineUnderTest, tmp_path: Path
) -> None:
    sender = _sender("delta", tmp_path)
    sender.connect([engine.address])

    whole = _send(engine, sender, "b", PolicyVersion(2, 0))
    first = engine.checksum()
    step = _send(engine, sender, "b", PolicyVersion(2, 1), noise=1e-6)
    second = engine.checksum()
    assert engine.run(lambda client: client.version()) == PolicyVersion(2, 1)
    assert step.sent_bytes < 0.2 * whole.sent_bytes
    assert whole.sent_bytes < 0.6 * whole.bytes, "bfloat16 is half of float32"
    sender.close()
    assert first == _rounded_on_disk(engine, "b", tmp_path, 0.0)
    assert second == _rounded_on_disk(engine, "b", tmp_path, 1e-6)
    assert first != second
