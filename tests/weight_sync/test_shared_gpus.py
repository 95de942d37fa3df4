"""Tests engines on the GPUs of trainer ranks: which rank sends weights to which engine, and that
all weights arrive.

The tests need no GPU. A stand-in for a CUDA handle goes through the same code: a block of shared
memory that exists as long as the tensor which it represents, and that only the tensor rank on the
sending rank's own GPU may open.
"""

from __future__ import annotations

import base64
import gc
import os
import pickle
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu_check.ipc_child import named_tensors
from megatron_async.config import build_config
from megatron_async.engines.host import EngineHost
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.gpu_sharing import engine_on, gpus_of, trainer_ranks_of
from megatron_async.weight_sync.http import EngineAddress
from megatron_async.weight_sync.verify import engine_parameter
from tests.distributed import run_ranks
from tests.hf_models import save_hf_model
from tests.trainer.cases import settings, trainer_session
from tests.weight_sync.fake_engine import FakeEngine, serving


@pytest.mark.parametrize(("count", "tensor"), [(8, 1), (4, 2), (2, 4), (1, 8), (3, 2), (1, 1)])
def test_every_gpu_of_an_engine_has_one_sender_which_trains_on_that_gpu(
    count: int, tensor: int
) -> None:
    visible = [f"GPU-{letter}" for letter in "hgfedcba"]
    used: list[str] = []
    for engine in range(count):
        gpus = gpus_of(engine, tensor, ", ".join(visible))
        sender_ranks = trainer_ranks_of(engine, tensor)
        assert [
            visible[sender_rank] for sender_rank in sender_ranks
        ] == gpus  # Rank r of torchrun uses the r-th GPU.
        assert {engine_on(sender_rank, count, tensor) for sender_rank in sender_ranks} == {engine}
        used += gpus
    assert len(set(used)) == len(used) == count * tensor
    assert trainer_ranks_of(0, tensor)[0] == 0, (
        "rank 0 broadcasts the results of the leaders of all engines"
    )


def test_gpus_of_returns_numbers_when_no_visible_gpus_are_listed() -> None:
    assert gpus_of(1, 2, None) == gpus_of(1, 2, "") == ["2", "3"]


def test_engine_server_sees_only_its_own_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_async.engines.sglang import process

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    shared = {"count": 2, "tensor": 2, "device": "cuda", "placement": "colocated"}
    config = build_config(colocated(4, **shared)).with_section("model", path=str(tmp_path))
    host = EngineHost("engine1", config, tmp_path / "log", 1)
    server = host._server
    found = process.server_environment(server.settings, "cuda", server.gpus, dict(os.environ))
    assert found["CUDA_VISIBLE_DEVICES"] == "6,7"


def colocated(ranks: int, **engines: Any) -> dict[str, Any]:
    return {
        "parallel": {"ranks": ranks},
        "schedule": {"preset": "copris"},
        "engines": {"placement": "colocated", **engines},
        "weights": {"transport": "tensor", "bucket_mib": 1, "timeout_seconds": 30},
    }


def test_config_refuses_colocated_engines_that_need_more_gpus_than_the_trainer() -> None:
    with pytest.raises(UserError, match=r"engines.count x engines.tensor is 6, parallel.ranks 4"):
        build_config(colocated(4, count=3, tensor=2))


# ------------------------------------------------------------ transfer of the weights


def _open(
    name: str, sender_rank: int, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[int, Tensor]:
    """Open a handle as an engine's unpickler does; return the sending rank and the tensor.

    Raises:
        FileNotFoundError: If the handle's tensor has been deleted.
    """
    block = SharedMemory(name)
    count = torch.Size(shape).numel()
    tensor = torch.frombuffer(bytearray(block.buf), dtype=dtype, count=count).reshape(shape)
    block.close()
    return sender_rank, tensor


class LiveBytes:
    """Counts the bytes behind this rank's handles: the current number, the largest number so far,
    and the size of the largest tensor."""

    now = most = largest = 0

    @classmethod
    def add(cls, change: int) -> None:
        cls.now += change
        cls.most = max(cls.most, cls.now)
        cls.largest = max(cls.largest, change)


def _release(block: SharedMemory, size: int) -> None:
    block.close()
    block.unlink()
    LiveBytes.add(-size)


def _handle(_pickler: Any, value: Any) -> Any:
    """Replace `_HandlePickler.reducer_override`: pickle a tensor as a block of shared memory
    instead of a CUDA handle."""
    if not isinstance(value, Tensor):
        return NotImplemented
    data = value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1)
    block = SharedMemory(create=True, size=max(1, value.nbytes))
    block.buf[: value.nbytes] = data.flatten().numpy().tobytes()
    weakref.finalize(value, _release, block, value.nbytes)
    LiveBytes.add(value.nbytes)
    return _open, (block.name, int(os.environ["RANK"]), tuple(value.shape), value.dtype)


class SharingEngine(FakeEngine):
    """A fake engine that opens the handle of every tensor rank, checks its sender, and keeps the
    values."""

    def __init__(self, index: int, tensor: int, known: set[str]) -> None:
        super().__init__("works", known)
        self.sender_ranks = trainer_ranks_of(index, tensor)

    def do_update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        payloads = [base64.b64decode(text) for text in body["serialized_named_tensors"]]
        assert len(payloads) == len(self.sender_ranks)
        for sender_rank, payload in zip(self.sender_ranks, payloads, strict=True):
            bucket = pickle.loads(payload)
            found, flat = bucket["flattened_tensor"]
            assert found == sender_rank, "the handle belongs to another GPU"
            named = dict(named_tensors({**bucket, "flattened_tensor": flat}))
            if self.refuses in named:
                return 400, {"message": "not enough memory for these weights"}
            self.loaded.update(named)
            self.received.append(flat.nbytes)
        self._set_version(body)
        return 200, {}


BUCKET_MIB = 0.02
Plan = tuple[dict[str, Any], int, int, list[str]]


def publish(model_dir: Path, plans: list[Plan]) -> list[Any]:
    """Publish one version for each (layout, number of engines, tensor ranks of each, addresses) of
    `plans`; return the engines that got each version, or the error message."""
    from megatron_async.weight_sync.publisher import WeightPublisher
    from megatron_async.weight_sync.transports import tensor as transport

    transport._HandlePickler.reducer_override = _handle  # type: ignore[method-assign]
    # With the collector off, a reference cycle keeps a bucket's memory, so that the test fails.
    gc.disable()
    found: list[Any] = []
    for number, (layout, count, tensor, urls) in enumerate(plans):
        changes = colocated(4, count=count, tensor=tensor)
        changes["parallel"] |= layout
        config = settings(model_dir, changes)
        engines = [EngineAddress(f"engine{i}.1", url) for i, url in enumerate(urls) if url]
        with trainer_session(config) as trainer:
            publisher = WeightPublisher(config, trainer.model, model_dir)
            publisher._settings = config.weights.model_copy(update={"bucket_mib": BUCKET_MIB})
            try:
                found.append(publisher.publish(engines, PolicyVersion(0, number)))
            except ComponentFailure as error:
                found.append(str(error))
            publisher.close()
    # Three sent buckets and the bucket being gathered. A tensor above the limit is its own bucket.
    bucket = max(BUCKET_MIB * 2**20, LiveBytes.largest)
    assert LiveBytes.most <= 4 * bucket, (
        f"{LiveBytes.most} bytes in use, with buckets of {bucket:.0f} bytes"
    )
    return found


def start_engines(stack: ExitStack, count: int, tensor: int, known: set[str]) -> list[Any]:
    made = [SharingEngine(index, tensor, known) for index in range(count)]
    return [(engine, stack.enter_context(serving(engine, "")).url) for engine in made]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    directory = tmp_path / "model"
    save_hf_model("qwen3", directory)
    yield directory, load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_every_tensor_rank_gets_every_tensor_from_the_trainer_rank_on_its_gpu(
    model: tuple[Path, dict[str, Tensor]],
) -> None:
    """The weights are sent in many buckets, for several layouts of the trainer; an engine without
    an address is skipped."""
    directory, expected = model
    known = {engine_parameter(name) for name in expected}
    layouts = [
        ({"tensor": 2, "pipeline": 2}, 2, 2),
        ({"pipeline": 4}, 4, 1),
        ({"tensor": 2}, 1, 2),
        ({}, 1, 4),
    ]
    with ExitStack() as stack:
        engines = [start_engines(stack, count, tensor, known) for _, count, tensor in layouts]
        plans = [
            (layout, count, tensor, [url for _, url in made])
            for (layout, count, tensor), made in zip(layouts, engines, strict=True)
        ]
        # Engine 0 is restarting and has no address.
        plans.append((layouts[0][0], 2, 2, ["", engines[0][1][1]]))
        results = run_ranks(publish, 4, directory, plans)
    assert all(result == results[0] for result in results)
    assert results[0] == [
        ["engine0.1", "engine1.1"],
        [f"engine{i}.1" for i in range(4)],
        ["engine0.1"],
        ["engine0.1"],
        ["engine1.1"],
    ]
    for number, made in enumerate(engines):
        for index, (engine, _) in enumerate(made):
            assert engine.loaded.keys() == expected.keys()
            assert all(torch.equal(engine.loaded[name], expected[name]) for name in expected)
            assert len(engine.received) > 3 * len(engine.sender_ranks), (
                "the weights must be sent in several buckets"
            )
            again = number == 0 and index == 1
            assert engine.version == str(PolicyVersion(0, 4 if again else number))


@pytest.mark.slow
def test_other_engine_gets_all_weights_when_one_fails_during_the_update(
    model: tuple[Path, dict[str, Tensor]],
) -> None:
    directory, expected = model
    known = {engine_parameter(name) for name in expected}
    with ExitStack() as stack:
        made = start_engines(stack, 2, 2, known)
        made[0][0].refuses = sorted(expected)[len(expected) // 2]
        plan = ({"tensor": 2, "pipeline": 2}, 2, 2, [url for _, url in made])
        results = run_ranks(publish, 4, directory, [plan])
    assert results == [[["engine1.1"]]] * 4
    good = made[1][0]
    assert all(torch.equal(good.loaded[name], expected[name]) for name in expected)
    assert good.version == "0.0"


@pytest.mark.slow
def test_every_engine_gets_the_experts_of_all_expert_ranks(tmp_path: Path) -> None:
    directory = tmp_path / "moe"
    save_hf_model("qwen3_moe", directory)
    expected = load_file(directory / "model.safetensors")
    known = {engine_parameter(name) for name in expected}
    with ExitStack() as stack:
        made = start_engines(stack, 2, 2, known)
        plan = ({"tensor": 2, "expert": 2, "sequence": True}, 2, 2, [url for _, url in made])
        results = run_ranks(publish, 4, directory, [plan])
    assert results == [[["engine0.1", "engine1.1"]]] * 4
    for engine, _ in made:
        assert all(torch.equal(engine.loaded[name], expected[name]) for name in expected)
