"""A character tokenizer in Hugging Face format, for models that are trained from nothing.

Invariants
- One token per character: printable ASCII, newline and tab; anything else is `<unk>`.
- `decode(encode(text)) == text` for every text of those characters that spells no special token.
- Ids never change: a checkpoint of one run loads with the tokenizer of another.
- The vocabulary has exactly `VOCAB_SIZE` rows, a multiple of 128, so that it divides over
  tensor-parallel ranks without Megatron padding it; rows without a character are never encoded.
- The directory that `write_character_tokenizer` leaves is read by `AutoTokenizer` and by SGLang,
  offline and without code of ours.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

PAD_TOKEN: Final = "<pad>"
EOS_TOKEN: Final = "<eos>"
UNK_TOKEN: Final = "<unk>"
PAD_ID: Final = 0
EOS_ID: Final = 1
UNK_ID: Final = 2
VOCAB_SIZE: Final = 128
MODEL_MAX_LENGTH: Final = 4096

CHARACTERS: Final = (
    string.digits + string.ascii_lowercase + string.ascii_uppercase + string.punctuation + " \n\t"
)


def character_vocabulary() -> dict[str, int]:
    """Token text to id: three specials, the characters, then unused rows up to `VOCAB_SIZE`."""
    tokens = [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *CHARACTERS]
    tokens += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer itself. It adds no special token of its own to what it encodes."""
    backend = Tokenizer(models.BPE(vocab=character_vocabulary(), merges=[], unk_token=UNK_TOKEN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False) for token in (PAD_TOKEN, EOS_TOKEN, UNK_TOKEN)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNK_TOKEN,
        model_max_length=MODEL_MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def write_character_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`, which must exist."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(str(directory))
    return tokenizer
