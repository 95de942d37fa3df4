"""The character tokenizer: lossless, stable, loadable without our code."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from megatron_async.models.tiny_model import (
    CHARACTERS,
    EOS_ID,
    EOS_TOKEN,
    PAD_ID,
    UNK_ID,
    VOCAB_SIZE,
    character_tokenizer,
    write_character_tokenizer,
)

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
def test_one_token_a_character_and_back(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=True)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text


def test_loaded_by_autotokenizer_it_is_the_same(loaded: PreTrainedTokenizerBase) -> None:
    text = "State the answer to: 12 - 7 + 3 =\n\t#8"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert (loaded.pad_token_id, loaded.eos_token_id) == (PAD_ID, EOS_ID)
    assert len(loaded) == VOCAB_SIZE


def test_specials_and_unknown_characters(loaded: PreTrainedTokenizerBase) -> None:
    assert loaded.encode("é") == [UNK_ID]
    assert loaded.encode("1" + EOS_TOKEN)[-1] == EOS_ID
    assert loaded.decode([4, EOS_ID, PAD_ID], skip_special_tokens=True) == "1"


def test_ids_never_change() -> None:
    assert TOKENIZER.encode("09azAZ!~ \n\t") == [3, 12, 13, 38, 39, 64, 65, 96, 97, 98, 99]
