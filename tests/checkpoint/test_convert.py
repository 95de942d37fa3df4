"""Tests that conversion, also by its command, is bit-exact, streamed, and all or nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from megatron_async.checkpoint.convert import hf_to_megatron, megatron_to_hf
from megatron_async.checkpoint.manager import CheckpointManager
from megatron_async.checkpoint.placement import stage_parameter_ids
from megatron_async.cli import app
from megatron_async.config import dump
from megatron_async.config.run import CheckpointConfig
from megatron_async.errors import UserError
from megatron_async.files.package_files import ROOT
from megatron_async.models.export import buckets
from megatron_async.models.families import read_architecture
from megatron_async.models.model_files import SafetensorsDirectory
from megatron_async.models.save import write_model_directory
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.types import FloatArray, PolicyVersion
from tests.distributed import run_ranks
from tests.hf_models import (
    CASES,
    EXPERT_CASES,
    NARROW_CASES,
    reference_logprobs,
    save_hf_model,
    tensors_of,
)
from tests.trainer.cases import ragged_batch, settings, trainer_session

FAMILIES = (*CASES, *EXPERT_CASES)
LAYOUTS = {
    "tp2": {"ranks": 2, "tensor": 2, "sequence": True},
    "pp2": {"ranks": 2, "pipeline": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model directory for each family."""
    root = tmp_path_factory.mktemp("models")
    for case in FAMILIES:
        save_hf_model(case, root / case)
        (root / case / "tokenizer.json").write_text('{"version": "1.0"}')
    return root


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "tp", "pp"),
    [
        (case, tp, pp)
        for case in FAMILIES
        for tp, pp in ((1, 1), (2, 2), (4, 1))
        if tp < 4 or case not in NARROW_CASES
    ],
)
def test_conversion_to_megatron_and_back_is_bit_exact(
    case: str, tp: int, pp: int, models: Path, tmp_path: Path
) -> None:
    hf_to_megatron(models / case, tmp_path / "megatron", tensor=tp, pipeline=pp)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", max_shard_bytes=20_000)
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(models / case))
    assert (tmp_path / "hf" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == json.loads(
        (models / case / "config.json").read_text()
    )


def test_conversion_there_and_back_is_bit_exact_for_user_defined_family(tmp_path: Path) -> None:
    save_hf_model("mistral", tmp_path / "model")
    example = Path(__file__).parents[2] / "examples" / "own_family" / "mistral.py"
    family = f"{example}:FAMILY"
    hf_to_megatron(tmp_path / "model", tmp_path / "megatron", tensor=2, family=family)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", family=family)
    assert_same(tensors_of(tmp_path / "hf"), tensors_of(tmp_path / "model"))
    with SafetensorsDirectory(tmp_path / "hf") as converted:
        assert converted.version() == "", "the weights are not from a run"


def start_and_save(models: Path, root: Path, layout: str) -> list[str]:
    """On every rank, start a trainer from converted weights and save it, once for each family.

    Returns:
        The families, whose runs are below `root`.
    """
    for case in FAMILIES:
        run = root / layout / case
        config = settings(
            models / case,
            {
                "model": {"checkpoint": str(root / "converted" / case)},
                "parallel": LAYOUTS[layout],
                "name": case,
            },
        )
        with trainer_session(config) as trainer:
            checkpoints = CheckpointManager(run / "checkpoints", CheckpointConfig())
            checkpoints.save(trainer, {})
            checkpoints.close()
            (run / "config.yaml").write_text(dump(config))
    return list(FAMILIES)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_checkpoint_converts_back_when_run_started_from_converted_weights(
    layout: str, models: Path, tmp_path: Path
) -> None:
    # The checkpoints are cut for another layout than that of the trainers that load them.
    for case in FAMILIES:
        hf_to_megatron(models / case, tmp_path / "converted" / case, tensor=1, pipeline=4)
    run_ranks(start_and_save, 2, models, tmp_path, layout, timeout_seconds=150)
    for case in FAMILIES:
        megatron_to_hf(tmp_path / layout / case, tmp_path / "hf" / case)
        assert_same(tensors_of(tmp_path / "hf" / case), tensors_of(models / case))


@dataclass(frozen=True)
class TrainedRun:
    """A run directory with one checkpoint, and the log-probs of a batch by the trainer that saved
    it."""

    directory: Path
    batch: TokenBatch
    logprobs_T: FloatArray

    def assert_same_outputs(self, hf: Path) -> None:
        """Check that transformers computes the trainer's log-probs with the model in `hf`."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(hf).eval()
        ids = torch.from_numpy(self.batch.token_ids_T).long()
        cu = torch.from_numpy(self.batch.cu_seqlens_S1)
        mask_T = torch.from_numpy(self.batch.loss_mask_T)
        theirs = reference_logprobs(model, ids, cu, 1.0) * mask_T
        assert float((theirs - torch.from_numpy(self.logprobs_T)).abs().max()) < 1e-5


@pytest.fixture(scope="module")
def trained(models: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedRun:
    """Return a run that is one large step away from the Hugging Face model with which it
    started."""
    directory = tmp_path_factory.mktemp("trained")
    config = settings(models / "qwen3", {"optimizer": {"lr": 1e-2}})
    with trainer_session(config) as trainer:
        trainer.train_batch(ragged_batch(0))
        checkpoints = CheckpointManager(directory / "checkpoints", CheckpointConfig())
        checkpoints.save(trainer, {})
        checkpoints.close()
        batch = ragged_batch(1)
        logprobs_T = trainer.compute_logprobs(batch)
    (directory / "config.yaml").write_text(dump(config))
    return TrainedRun(directory, batch, logprobs_T)


@pytest.mark.slow
def test_converted_checkpoint_gives_the_trainers_logprobs_in_transformers(
    trained: TrainedRun, models: Path, tmp_path: Path
) -> None:
    megatron_to_hf(trained.directory, tmp_path / "hf")
    trained.assert_same_outputs(tmp_path / "hf")
    with SafetensorsDirectory(tmp_path / "hf") as exported:
        assert exported.version() == "0.1"
    before = tensors_of(models / "qwen3")
    assert any(not torch.equal(t, before[name]) for name, t in tensors_of(tmp_path / "hf").items())


@pytest.mark.slow
def test_convert_script_converts_a_run_or_prints_its_usage(
    trained: TrainedRun, tmp_path: Path
) -> None:
    def convert_to_hf(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "launch" / "convert_to_hf.sh"), *map(str, arguments)],
            env={**os.environ, "MEGATRON_ASYNC_VENV": str(Path(sys.executable).parents[1])},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )

    done = convert_to_hf(trained.directory, "hf", "--shard-gb", 2e-5)
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    trained.assert_same_outputs(tmp_path / "hf")

    usage = convert_to_hf(trained.directory)
    assert usage.returncode == 2
    assert "convert_to_hf.sh runs/NAME DESTINATION" in usage.stderr


@pytest.mark.slow
class TestPrecision:
    def test_conversion_keeps_precision_of_each_tensor_when_mixed(
        self, models: Path, tmp_path: Path
    ) -> None:
        source = tmp_path / "source"
        source.mkdir()
        tensors = {
            name: tensor if "norm" in name else tensor.to(torch.bfloat16)
            for name, tensor in tensors_of(models / "qwen2").items()
        }
        save_file(tensors, source / "model.safetensors")
        (source / "config.json").write_text((models / "qwen2" / "config.json").read_text())
        hf_to_megatron(source, tmp_path / "megatron", tensor=2)
        megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
        assert_same(tensors_of(tmp_path / "hf"), tensors)

    def test_conversion_records_dtype_in_config_json_when_it_casts(
        self, models: Path, tmp_path: Path
    ) -> None:
        hf_to_megatron(models / "llama3", tmp_path / "megatron")
        megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype="bfloat16")
        expected = {
            name: tensor.to(torch.bfloat16)
            for name, tensor in tensors_of(models / "llama3").items()
        }
        assert_same(tensors_of(tmp_path / "hf"), expected)
        assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"
        assert not (tmp_path / "megatron" / "hf" / "model.safetensors").exists()


@pytest.mark.slow
class TestRefusals:
    def test_conversion_names_the_fault_when_source_or_destination_is_unusable(
        self, models: Path, tmp_path: Path
    ) -> None:
        source = models / "llama3"
        existing = tmp_path / "existing"
        existing.mkdir()
        with pytest.raises(UserError, match=r"--dst .*existing exists already"):
            hf_to_megatron(source, existing)
        with pytest.raises(UserError, match=r"parallel\.tensor is 3"):
            hf_to_megatron(source, tmp_path / "x", tensor=3)
        with pytest.raises(UserError, match="does not exist"):
            megatron_to_hf(tmp_path / "nowhere", tmp_path / "x")
        with pytest.raises(UserError, match="has no readable manifest"):
            megatron_to_hf(source, tmp_path / "x")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["existing"]

    def test_conversion_refuses_checkpoint_of_another_model(
        self, models: Path, tmp_path: Path
    ) -> None:
        hf_to_megatron(models / "qwen2", tmp_path / "megatron")
        with pytest.raises(UserError, match=r"tensor .* has shape .* config\.json requires"):
            megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", model=models / "gemma3")

    def test_conversion_refuses_checkpoint_when_a_file_is_damaged(
        self, models: Path, tmp_path: Path
    ) -> None:
        hf_to_megatron(models / "qwen2", tmp_path / "megatron")
        path = tmp_path / "megatron" / "rank_00000.f32.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(UserError, match=r"is corrupt: rank_00000\.f32\.safetensors has"):
            megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")


if TYPE_CHECKING:
    from tests.engine import EngineUnderTest


def write_source(folder: Path, gigabytes: float, shard_gb: float) -> int:
    """Write a random bfloat16 Llama of about `gigabytes` into `folder`; return its size in
    bytes."""
    layers = max(1, round(gigabytes / 0.25))  # A layer of this shape has 0.25 GB.
    config = {
        "model_type": "llama",
        "hidden_size": 3072,
        "intermediate_size": 9216,
        "num_attention_heads": 24,
        "num_key_value_heads": 24,
        "num_hidden_layers": layers + layers % 2,
        "vocab_size": 4000,
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
        for parameter_id in stage_parameter_ids(architecture, 0, 1):
            for name, shape in zip(
                parameter_id.tensor_names, parameter_id.rule.shapes, strict=True
            ):
                # Bits below those of infinity, since a conversion refuses non-finite weights.
                bits = torch.randint(0, 0x7F80, shape, generator=generator, dtype=torch.int16)
                total += bits.nbytes
                yield name, bits.view(torch.bfloat16)

    write_model_directory(buckets(tensors(), int(shard_gb * 1e9)), folder, shape_only)
    return total


def call(*arguments: object) -> str:
    """Run the command `convert`; return its output."""
    result = CliRunner().invoke(app, ["convert", *map(str, arguments)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
@pytest.mark.one_core
def test_convert_command_writes_index_and_shows_progress(tmp_path: Path) -> None:
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


FILE_BYTES = 200_000_000
_PEAK = """
import re, sys, threading, time
from pathlib import Path
from megatron_async.checkpoint.convert import hf_to_megatron, megatron_to_hf

def now():  # Without mapped files, whose pages the system reclaims when it needs memory.
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def watch():
    global peak
    while True:
        peak = max(peak, now())
        time.sleep(0.002)

before = peak = now()
threading.Thread(target=watch, daemon=True).start()
source, checkpoint, back = map(Path, sys.argv[1:])
hf_to_megatron(source, checkpoint, tensor=2, pipeline=2)
print(peak - before)
megatron_to_hf(checkpoint, back, max_shard_bytes=200_000_000)
print(peak - before)
"""


@pytest.mark.slow
@pytest.mark.one_core
def test_conversion_memory_stays_about_twice_the_largest_file(tmp_path: Path) -> None:
    """Converts a model of 0.9 GB whose files have 0.2 GB each."""
    source = tmp_path / "source"
    write_source(source, gigabytes=1.0, shard_gb=0.2)
    largest = max(path.stat().st_size for path in source.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    assert whole > 4 * largest
    # One process runs both conversions, so that memory left by the first counts for the second.
    # The fixed threshold makes the C library return each freed tensor to the system at once. With
    # the default, freed tensors stay in fragmented heaps, and the peak varies by 0.3 files.
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, *(str(p) for p in (source, tmp_path / "m", tmp_path / "b"))],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)},
    )
    assert done.returncode == 0, done.stderr
    peaks = [int(word) * 1024 for word in done.stdout.split()[-2:]]
    for direction, grown in zip(("to Megatron", "to Hugging Face"), peaks, strict=True):
        assert grown <= 2.0 * FILE_BYTES, f"{direction}: {grown / 1e6:.0f} MB, files of 200 MB"


@pytest.mark.slow
@pytest.mark.engine
def test_converted_model_has_the_same_checksum_in_sglang(
    sglang_engine: EngineUnderTest, tmp_path: Path
) -> None:
    sglang_engine.reset_to("a")
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
