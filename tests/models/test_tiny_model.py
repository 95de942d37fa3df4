"""The quickstart's model: small, deterministic, splittable over two ranks, readable by others."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_async.errors import UserError
from megatron_async.models.tiny_model import VOCAB_SIZE, TinyModel, build_tiny_model


def test_it_is_a_qwen3_of_one_to_three_million_parameters(tmp_path: Path) -> None:
    parameters = build_tiny_model(tmp_path / "model", seed=1)
    assert 1_000_000 <= parameters <= 3_000_000
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "model"), dtype=torch.float32)
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == VOCAB_SIZE
    assert model.num_parameters() == parameters
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "model"))
    logits = model(torch.tensor([tokenizer.encode("1+2=")])).logits
    assert logits.shape == (1, 4, VOCAB_SIZE)
    assert torch.isfinite(logits).all()


def test_the_same_seed_gives_the_same_bytes_and_another_does_not(tmp_path: Path) -> None:
    small = TinyModel(hidden_size=32, layers=1, heads=2, ffn_size=64, head_dim=16)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        build_tiny_model(tmp_path / name, seed, small)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"]
    assert weights["a"] != weights["c"]


def test_an_existing_directory_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        build_tiny_model(tmp_path, seed=1)


def test_model_files_have_the_umasks_mode(tmp_path: Path, new_file_mode: int) -> None:
    build_tiny_model(tmp_path / "m", seed=0, shape=TinyModel(layers=1))
    files = list((tmp_path / "m").iterdir())
    assert "model.safetensors" in {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {new_file_mode}
