"""Engines on the GPUs of trainer ranks: who gives weights to whom, and that all of them arrive.

There is no GPU here. A stand-in for a CUDA handle goes through the same code: a block of shared
memory that is there as long as the tensor it stands for, and that only the tensor rank on the
giver's own GPU may open.
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
def test_every_gpu_of_an_engine_has_one_giver_which_trains_on_it(count: int, tensor: int) -> None:
    visible = [f"GPU-{letter}" for letter in "hgfedcba"]
    used: list[str] = []
    for engine in range(count):
        gpus = gpus_of(engine, tensor, ", ".join(visible))
        givers = trainer_ranks_of(engine, tensor)
        assert [visible[giver] for giver in givers] == gpus  # torchrun's rank r is on the r-th
        assert {engine_on(giver, count, tensor) for giver in givers} == {engine}
        used += gpus
    assert len(set(used)) == len(used) == count * tensor
    assert trainer_ranks_of(0, tensor)[0] == 0, "rank 0 spreads the outcome of all leaders"


def test_without_a_list_of_visible_gpus_they_are_numbered() -> None:
    assert gpus_of(1, 2, None) == gpus_of(1, 2, "") == ["2", "3"]


def test_an_engines_server_sees_its_own_gpus_only(
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


def test_engines_beyond_the_trainers_gpus_are_refused() -> None:
    with pytest.raises(UserError, match=r"engines.count x engines.tensor is 6, parallel.ranks 4"):
        build_config(colocated(4, count=3, tensor=2))


# ------------------------------------------------------------ the way of the weights


def _open(name: str, giver: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, Tensor]:
    """What an engine's unpickler does with a handle; FileNotFoundError once its tensor is gone."""
    block = SharedMemory(name)
    count = torch.Size(shape).numel()
    tensor = torch.frombuffer(bytearray(block.buf), dtype=dtype, count=count).reshape(shape)
    block.close()
    return giver, tensor


class Live:
    """Bytes behind this rank's handles: now, the most there have been, and of one tensor."""

    now = most = largest = 0

    @classmethod
    def add(cls, change: int) -> None:
        cls.now += change
        cls.most = max(cls.most, cls.now)
        cls.largest = max(cls.largest, change)


def _drop(block: SharedMemory, size: int) -> None:
    block.close()
    block.unlink()
    Live.add(-size)


def _handle(_pickler: Any, value: Any) -> Any:
    """In place of `_HandlePickler.reducer_override`: shared memory for CUDA's."""
    if not isinstance(value, Tensor):
        return NotImplemented
    data = value.contiguous().view(torch.uint8) if value.dim() else value.reshape(1)
    block = SharedMemory(create=True, size=max(1, value.nbytes))
    block.buf[: value.nbytes] = data.flatten().numpy().tobytes()
    weakref.finalize(value, _drop, block, value.nbytes)
    Live.add(value.nbytes)
    return _open, (block.name, int(os.environ["RANK"]), tuple(value.shape), value.dtype)


class SharingEngine(FakeEngine):
    """Opens the handle of each tensor rank, and takes the values of the last one."""

    def __init__(self, index: int, tensor: int, known: set[str]) -> None:
        super().__init__("works", known)
        self.givers = trainer_ranks_of(index, tensor)

    def do_update_weights_from_tensor(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        payloads = [base64.b64decode(text) for text in body["serialized_named_tensors"]]
        assert len(payloads) == len(self.givers)
        for giver, payload in zip(self.givers, payloads, strict=True):
            bucket = pickle.loads(payload)
            found, flat = bucket["flattened_tensor"]
            assert found == giver, "a handle of another GPU"
            named = dict(named_tensors({**bucket, "flattened_tensor": flat}))
            if self.refuses in named:
                return 400, {"message": "no room for these weights"}
            self.loaded.update(named)
            self.received.append(flat.nbytes)
        self._versioned(body)
        return 200, {}


BUCKET_MIB = 0.02
Plan = tuple[dict[str, Any], int, int, list[str]]


def publish(model_dir: Path, plans: list[Plan]) -> list[Any]:
    """One publication for each (layout, engines, their TP, their addresses)."""
    from megatron_async.weight_sync.publisher import WeightPublisher
    from megatron_async.weight_sync.transports import tensor as transport

    transport._HandlePickler.reducer_override = _handle  # type: ignore[method-assign]
    gc.disable()  # a cycle of references would keep a bucket on the GPU until the collector comes
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
    # Three buckets and the one in the making; a tensor above the limit is a bucket of its own.
    bucket = max(BUCKET_MIB * 2**20, Live.largest)
    assert Live.most <= 4 * bucket, f"{Live.most} bytes held, buckets of {bucket:.0f}"
    return found


def engines_for(stack: ExitStack, count: int, tensor: int, known: set[str]) -> list[Any]:
    made = [SharingEngine(index, tensor, known) for index in range(count)]
    return [(engine, stack.enter_context(serving(engine, "")).url) for engine in made]


@pytest.fixture
def model(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    directory = tmp_path / "model"
    save_hf_model("qwen3", directory)
    yield directory, load_file(directory / "model.safetensors")


@pytest.mark.slow
def test_every_tensor_rank_gets_every_tensor_from_the_rank_on_its_gpu(
    model: tuple[Path, dict[str, Tensor]],
) -> None:
    """Whatever the trainer's layout, in many buckets; an engine that is not there is left out."""
    directory, expected = model
    known = {engine_parameter(name) for name in expected}
    layouts = [
        ({"tensor": 2, "pipeline": 2}, 2, 2),
        ({"pipeline": 4}, 4, 1),
        ({"tensor": 2}, 1, 2),
        ({}, 1, 4),
    ]
    with ExitStack() as stack:
        engines = [engines_for(stack, count, tensor, known) for _, count, tensor in layouts]
        plans = [
            (layout, count, tensor, [url for _, url in made])
            for (layout, count, tensor), made in zip(layouts, engines, strict=True)
        ]
        plans.append((layouts[0][0], 2, 2, ["", engines[0][1][1]]))  # engine 0 is being restarted
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
            assert len(engine.received) > 3 * len(engine.givers), "several buckets"
            again = number == 0 and index == 1
            assert engine.version == str(PolicyVersion(0, 4 if again else number))


@pytest.mark.slow
def test_an_engine_that_fails_half_way_does_not_cost_the_others(
    model: tuple[Path, dict[str, Tensor]],
) -> None:
    directory, expected = model
    known = {engine_parameter(name) for name in expected}
    with ExitStack() as stack:
        made = engines_for(stack, 2, 2, known)
        made[0][0].refuses = sorted(expected)[len(expected) // 2]
        plan = ({"tensor": 2, "pipeline": 2}, 2, 2, [url for _, url in made])
        results = run_ranks(publish, 4, directory, [plan])
    assert results == [[["engine1.1"]]] * 4
    good = made[1][0]
    assert all(torch.equal(good.loaded[name], expected[name]) for name in expected)
    assert good.version == "0.0"


@pytest.mark.slow
def test_experts_of_all_expert_ranks_reach_every_engine(tmp_path: Path) -> None:
    directory = tmp_path / "moe"
    save_hf_model("qwen3_moe", directory)
    expected = load_file(directory / "model.safetensors")
    known = {engine_parameter(name) for name in expected}
    with ExitStack() as stack:
        made = engines_for(stack, 2, 2, known)
        plan = ({"tensor": 2, "expert": 2, "sequence": True}, 2, 2, [url for _, url in made])
        results = run_ranks(publish, 4, directory, [plan])
    assert results == [[["engine0.1", "engine1.1"]]] * 4
    for engine, _ in made:
        assert all(torch.equal(engine.loaded[name], expected[name]) for name in expected)
