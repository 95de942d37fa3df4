"""Provides tokenizers, built without a network, whose tokens may contain a part of a character."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXTS = ("a hello world, hello again 😀 東京 東京都", "naïve größe hello 12 34 東 😀😀")
SPECIAL = ["<unk>", "<eos>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's space


def byte_level() -> Tokenizer:
    """Train a byte-level BPE tokenizer, like those of GPT-2, Llama 3 and Qwen."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def byte_fallback() -> Tokenizer:
    """Build a BPE tokenizer with byte fallback, like those of Llama 2 and Mistral.

    Characters that are not in the vocabulary become bytes.
    """
    letters = sorted(set(MARK + "abcdefghijklmnopqrstuvwxyz.,\ufffd"))
    merges = [("h", "e"), (MARK, "he"), ("l", "o")]
    tokens = [*SPECIAL, *BYTES, *letters, *("".join(pair) for pair in merges)]
    backend = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return backend


def unigram() -> Tokenizer:
    """Build a unigram tokenizer with byte fallback, like those of T5 and Gemma's predecessors."""
    pieces = [MARK, *"abcdefghijklmnopqrstuvwxyz", f"{MARK}hello", "lo"]
    vocabulary = [(token, -9.0) for token in (*SPECIAL, *BYTES)] + [(p, -2.0) for p in pieces]
    backend = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(), decoders.Fuse()]
    )
    return backend


def byte_tokenizer(make: Any) -> PreTrainedTokenizerFast:
    """Wrap the tokenizer that `make` builds as a transformers tokenizer with an end token."""
    return PreTrainedTokenizerFast(
        tokenizer_object=make(), eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
