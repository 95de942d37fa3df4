"""Tests that the quickstart's model and tokenizer are small, stable and readable by other
libraries."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from megatron_async.errors import UserError
from megatron_async.models.tiny_model import (
    CHARACTERS,
    EOS_ID,
    EOS_TOKEN,
    PAD_ID,
    UNK_ID,
    VOCAB_SIZE,
    TinyModel,
    build_tiny_model,
    character_tokenizer,
    write_character_tokenizer,
)


def test_tiny_model_is_a_qwen3_of_one_to_three_million_parameters(tmp_path: Path) -> None:
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


def test_tiny_model_has_equal_bytes_only_when_the_seed_is_equal(tmp_path: Path) -> None:
    small = TinyModel(hidden_size=32, layers=1, heads=2, ffn_size=64, head_dim=16)
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        build_tiny_model(tmp_path / name, seed, small)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"]
    assert weights["a"] != weights["c"]


def test_build_tiny_model_refuses_an_existing_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists already"):
        build_tiny_model(tmp_path, seed=1)


def test_tiny_models_files_have_the_umasks_mode(tmp_path: Path, new_file_mode: int) -> None:
    build_tiny_model(tmp_path / "m", seed=0, shape=TinyModel(layers=1))
    files = list((tmp_path / "m").iterdir())
    assert "model.safetensors" in {path.name for path in files}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {new_file_mode}


TOKENIZER = character_tokenizer()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(directory)
    return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)


SPECIALS = ("<pad>", "<eos>", "<unk>")


@given(
    st.text(alphabet=CHARACTERS, max_size=200).filter(
        lambda text: not any(special in text for special in SPECIALS)
    )
)
def test_tokenizer_gives_one_token_for_each_character_and_decodes_them(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=True)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_tokenizer_is_unchanged_when_loaded_by_autotokenizer(
    loaded: PreTrainedTokenizerBase,
) -> None:
    text = "State the answer to: 12 - 7 + 3 =\n\t#8"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token_id, loaded.eos_token_id) == (PAD_ID, EOS_ID)
    assert len(loaded) == VOCAB_SIZE


def test_tokenizer_encodes_special_tokens_and_unknown_characters(
    loaded: PreTrainedTokenizerBase,
) -> None:
    assert loaded.encode("é") == [UNK_ID]
    assert loaded.encode("1" + EOS_TOKEN)[-1] == EOS_ID
    assert loaded.decode([4, EOS_ID, PAD_ID], skip_special_tokens=True) == "1"


def test_tokenizer_ids_are_those_of_earlier_versions() -> None:
    assert TOKENIZER.encode("09azAZ!~ \n\t") == [3, 12, 13, 38, 39, 64, 65, 96, 97, 98, 99]
