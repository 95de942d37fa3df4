"""Tests the parts of weight updates that need no engine: parameter names, flat buckets, the
background stage and published directories."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.gpu_check.ipc_child import load, named_tensors
from megatron_async.config.rollout import EngineConfig
from megatron_async.errors import ComponentFailure
from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.background_stage import BackgroundStage
from megatron_async.weight_sync.transports.base import sending_device
from megatron_async.weight_sync.transports.flat_bucket import Buffers
from megatron_async.weight_sync.transports.tensor import flat_copy, serialize
from megatron_async.weight_sync.verify import NameCheck, engine_parameter
from megatron_async.weight_sync.version_directory import read_manifest, read_shard
from tests.weight_sync.published import publish

VERSION = PolicyVersion(2, 9)


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.layers.3.self_attn.q_proj.bias", "model.layers.3.self_attn.qkv_proj.bias"),
        ("model.layers.3.self_attn.v_proj.weight", "model.layers.3.self_attn.qkv_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate.weight"),
        ("model.layers.0.mlp.experts.11.up_proj.weight", "model.layers.0.mlp.experts.w13_weight"),
        ("model.layers.0.mlp.experts.11.down_proj.weight", "model.layers.0.mlp.experts.w2_weight"),
        (
            "model.layers.0.block_sparse_moe.experts.7.w1.weight",
            "model.layers.0.block_sparse_moe.experts.w13_weight",
        ),
    ],
)
def test_engine_parameter_maps_hugging_face_names_to_fused_parameters(
    name: str, parameter: str
) -> None:
    assert engine_parameter(name) == parameter


def test_name_check_passes_when_scales_computed_by_the_engine_are_not_sent() -> None:
    check = NameCheck(frozenset({"a.weight", "a.input_scale", "a.weight_scale_inv_deepgemm"}))
    check.add(["a.weight"])
    check.finish()


def test_flatten_keeps_every_tensor_aligned_and_bit_identical() -> None:
    generator = torch.Generator().manual_seed(0)
    bucket = [
        ("half", torch.randn(3, generator=generator).to(torch.bfloat16)),
        ("byte", torch.arange(5, dtype=torch.uint8)),
        ("single", torch.randn(2, 3, generator=generator).T),
        ("scalar", torch.tensor(4.0)),
    ]
    flat = Buffers(torch.device("cpu")).flatten(bucket)
    originals, start = dict(bucket), 0
    for name, dtype, shape in zip(flat.names, flat.dtypes, flat.shapes, strict=True):
        kind = getattr(torch, dtype)
        assert start % kind.itemsize == 0
        size = originals[name].nbytes
        back = flat.bytes_N[start : start + size].view(kind).view(shape)
        assert torch.equal(back, originals[name])
        start += size
    assert start == len(flat.bytes_N)


@pytest.mark.parametrize("device", ["auto", "cuda", "cpu"])
def test_sending_device_is_cpu_when_engines_run_on_cpus(
    monkeypatch: pytest.MonkeyPatch, device: Any
) -> None:
    """A trainer on GPUs then uses gloo instead of NCCL, and sends values instead of IPC handles."""
    engines = EngineConfig(device=device)
    assert sending_device(engines).type == "cpu", "this machine has no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert sending_device(engines).type == ("cpu" if device == "cpu" else "cuda")


def test_serialize_writes_a_bucket_as_one_tensor() -> None:
    bucket = [("half", torch.randn(3).bfloat16()), ("single", torch.randn(2, 3))]
    flat = flat_copy(bucket, by_value=True)
    assert flat.bytes_N.untyped_storage().nbytes() == 3 * 2 + 6 * 4
    named = named_tensors(load(serialize(flat)))
    assert [name for name, _ in named] == ["single", "half"]
    assert all(torch.equal(dict(named)[name], tensor) for name, tensor in bucket)


def test_published_version_is_complete_and_damage_is_detected(tmp_path: Path) -> None:
    buckets = [[("a", torch.randn(4, 4))], [("b", torch.randn(3).to(torch.bfloat16))]]
    path = publish(buckets, VERSION, tmp_path)
    assert path.name == "2.9" and list(tmp_path.iterdir()) == [path]
    manifest = read_manifest(path)
    assert manifest.version == "2.9"
    index = json.loads((path / "model.safetensors.index.json").read_text())
    for bucket in buckets:
        for name, tensor in bucket:
            assert torch.equal(load_file(path / index["weight_map"][name])[name], tensor)
    name = "model-00-00001.safetensors"
    read_shard(path, name, manifest.shards[name])
    data = bytearray((path / name).read_bytes())
    data[-1] ^= 1
    (path / name).write_bytes(data)
    with pytest.raises(ComponentFailure, match="damaged"):
        read_shard(path, name, manifest.shards[name])
    text = (path / "manifest.json").read_text()
    (path / "manifest.json").write_text(text.replace("2.9", "2.8"))
    with pytest.raises(ComponentFailure, match="no readable manifest"):
        read_manifest(path)


def test_publish_leaves_no_files_when_writing_fails(tmp_path: Path) -> None:
    def failing_buckets() -> object:
        yield [("a", torch.zeros(4))]
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        publish(failing_buckets(), VERSION, tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_background_stage_processes_an_item_while_the_caller_makes_the_next() -> None:
    """Without overlap the test would time out, because the processing of item 0 waits until item 1
    is made."""
    made = threading.Event()
    seen: list[int] = []

    def work(item: int) -> None:
        if item == 0:
            assert made.wait(10)
        seen.append(item)

    with BackgroundStage[int](work) as stage:
        stage.put(0)
        made.set()  # Item 1 is made while item 0 is being processed.
        stage.put(1)
        stage.put(2)
    assert seen == [0, 1, 2]


def test_background_stage_raises_the_last_items_error_when_it_exits() -> None:
    def work(item: int) -> None:
        if item == 2:
            raise ArithmeticError("out of memory")

    with pytest.raises(ArithmeticError, match="out of memory"), BackgroundStage[int](work) as stage:
        for item in range(3):
            stage.put(item)


def test_background_stage_raises_the_callers_own_error_when_both_fail() -> None:
    with pytest.raises(KeyError), BackgroundStage[int](lambda item: 1 // item and None) as stage:
        stage.put(0)
        raise KeyError("gathering failed")
