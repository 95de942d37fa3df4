"""Conversion as people use it: the command both ways, its memory, and SGLang as a reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from megatron_async.checkpoint.placement import stage_slots
from megatron_async.cli import app
from megatron_async.models.export import buckets
from megatron_async.models.families import read_architecture
from megatron_async.models.save import write_model_directory
from megatron_async.trajectory.types import PolicyVersion
from tests.hf_models import save_hf_model, tensors_of

if TYPE_CHECKING:
    from tests.engine import EngineUnderTest


def write_source(folder: Path, gigabytes: float, shard_gb: float) -> int:
    """A random bf16 Llama of about this size; its bytes."""
    layers = max(1, round(gigabytes / 0.25))  # a layer of this shape has 0.25 GB
    config = {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_attention_heads": 24,
        "num_key_value_heads": 24,
        "num_hidden_layers": layers + layers % 2,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
    shape_only = folder.parent / "config"
    shape_only.mkdir()
    (shape_only / "config.json").write_text(json.dumps(config))
    architecture = read_architecture(shape_only)
    total = 0
    generator = torch.Generator().manual_seed(0)

    def tensors():  # type: ignore[no-untyped-def]
        nonlocal total
        for slot in stage_slots(architecture, 0, 1):
            for name, shape in zip(slot.tensor_names, slot.rule.shapes, strict=True):
                # Below the bits of infinity: a conversion refuses what no model has.
                bits = torch.randint(0, 0x7F80, shape, generator=generator, dtype=torch.int16)
                total += bits.nbytes
                yield name, bits.view(torch.bfloat16)

    write_model_directory(buckets(tensors(), int(shard_gb * 1e9)), folder, shape_only)
    return total


def call(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.one_core
def test_the_command_converts_there_and_back_with_index_and_progress(tmp_path: Path) -> None:
    source, checkpoint, back = (tmp_path / name for name in ("hf", "megatron", "back"))
    save_hf_model("llama3", source)
    (source / "tokenizer.json").write_text("{}")
    first = call("hf-to-megatron", "--src", source, "--dst", checkpoint, "--tp", 2, "--pp", 2)
    assert "100 %" in first and f"model.checkpoint={checkpoint}" in first
    second = call("megatron-to-hf", "--src", checkpoint, "--dst", back, "--shard-gb", 2e-5)
    assert "100 %" in second
    assert {"config.json", "tokenizer.json"} <= {path.name for path in back.iterdir()}
    index = json.loads((back / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(index.values())) > 1
    expected = tensors_of(source)
    found = tensors_of(back)
    assert found.keys() == expected.keys() == index.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


_PEAK = """
import re, sys
from pathlib import Path
from megatron_async.checkpoint.convert import hf_to_megatron, megatron_to_hf
def peak():  # not ru_maxrss, which a child inherits from the process that started it
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = peak()
source, checkpoint, back = map(Path, sys.argv[1:])
hf_to_megatron(source, checkpoint, tensor=2, pipeline=2)
print(peak() - before)
megatron_to_hf(checkpoint, back, max_shard_bytes=200_000_000)
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.one_core
def test_memory_is_at_most_twice_the_largest_file_whatever_the_size(tmp_path: Path) -> None:
    """A source of 0.9 GB in files of 0.2 GB."""
    source = tmp_path / "source"
    write_source(source, gigabytes=0.5, shard_gb=0.2)
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert whole > 4 * largest
    # One process for both: what the second way needs comes on top of what the first one left.
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, *(str(p) for p in (source, tmp_path / "m", tmp_path / "b"))],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    peaks = [int(word) * 1024 for word in done.stdout.split()[-2:]]
    for way, grown in zip(("there", "back"), peaks, strict=True):
        assert grown <= 2 * largest, f"{way}: {grown / 1e6:.0f} MB, files of {largest / 1e6:.0f} MB"


@pytest.mark.slow
@pytest.mark.engine
def test_what_was_converted_back_loads_in_sglang(
    sglang_engine: EngineUnderTest, tmp_path: Path
) -> None:
    sglang_engine.hold("a")
    expected = sglang_engine.checksum()
    source = sglang_engine.directories["a"]
    call("hf-to-megatron", "--src", source, "--dst", tmp_path / "m", "--tp", 2, "--pp", 2)
    call("megatron-to-hf", "--src", tmp_path / "m", "--dst", tmp_path / "hf", "--shard-gb", 2e-5)
    sglang_engine.load("b", PolicyVersion(9, 0))
    assert sglang_engine.checksum() != expected
    sglang_engine.post(
        "update_weights_from_disk", {"model_path": str(tmp_path / "hf"), "weight_version": "9.1"}
    )
    assert sglang_engine.checksum() == expected
