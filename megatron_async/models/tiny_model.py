"""Builds the quickstart's model: a Qwen3 of one to three million parameters, with random weights.

Its character tokenizer is in Hugging Face format, for models that are trained from scratch.

Invariants
- The same `TinyModel` and seed give the same weights, byte for byte, with any number of threads.
- The numbers of heads and KV heads, the hidden size, the feed-forward size and the vocabulary are
  even, so that two tensor-parallel ranks can divide them.
- The directory is complete before it appears: it is written under a temporary name and renamed, so
  that a killed build never leaves a partial model.
- Each character is one token: printable ASCII, newline and tab; any other character is `<unk>`.
- `decode(encode(text)) == text` for every text of those characters in which no special token (such
  as `<unk>`) is spelled out.
- The id of each token is the same in every run, so a checkpoint of one run can be used with the
  tokenizer of another.
- The vocabulary has exactly `VOCAB_SIZE` rows, a multiple of 128, so that it divides over
  tensor-parallel ranks without padding by Megatron; no text is encoded to the ids of rows without a
  character.
- `AutoTokenizer` and SGLang read the directory that `write_character_tokenizer` leaves, offline and
  without project-defined code.
"""

import os
import shutil
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from megatron_async.errors import UserError
from megatron_async.files.disk import with_default_mode, writing
from megatron_async.models.model_files import SINGLE_FILE

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
    """Return the id of each token: first three special tokens, then the characters, and then unused
    tokens, `VOCAB_SIZE` in total."""
    tokens = [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, *CHARACTERS]
    tokens += [f"<unused{i}>" for i in range(VOCAB_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def character_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each character, which adds no special tokens to a
    text."""
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
    """Write the files of the character tokenizer into the existing `directory`; return the
    tokenizer."""
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(str(directory))
    return tokenizer


@dataclass(frozen=True)
class TinyModel:
    """Sizes of the quickstart's model.

    Attributes:
        init_std: Standard deviation of the initial values of all matrices.
    """

    hidden_size: int = 160
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn_size: int = 448
    init_std: float = 0.05

    def config(self) -> Qwen3Config:
        """Return the Hugging Face configuration (tied embeddings, no chat template, no sliding
        window)."""
        return Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=self.hidden_size,
            intermediate_size=self.ffn_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=MODEL_MAX_LENGTH,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            tie_word_embeddings=True,
            initializer_range=self.init_std,
            pad_token_id=PAD_ID,
            bos_token_id=None,
            eos_token_id=EOS_ID,
            dtype="float32",
        )


def build_tiny_model(directory: Path, seed: int, shape: TinyModel | None = None) -> int:
    """Write weights, config and tokenizer to a new `directory`; return the number of parameters.

    Args:
        directory: The directory to create.
        seed: Seed of the weights.
        shape: Sizes of the model; None means the defaults of `TinyModel`.

    Raises:
        UserError: If `directory` exists.
    """
    if directory.exists():
        raise UserError(f"model directory {directory} exists already")
    partial = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model = random_model(shape or TinyModel(), seed)
    with writing(directory):
        partial.mkdir(parents=True)
        with with_default_mode(partial / SINGLE_FILE):
            model.save_pretrained(str(partial))
        write_character_tokenizer(partial)
        partial.rename(directory)
    return sum(parameter.numel() for parameter in model.parameters())


def random_model(shape: TinyModel, seed: int) -> Qwen3ForCausalLM:
    """Return a model with new weights: matrices from a normal distribution, norms one.

    The global random state is unchanged.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(shape.config())
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, parameter in sorted(model.named_parameters()):
                if parameter.dim() == 1:
                    parameter.fill_(1.0)
                else:
                    parameter.normal_(0.0, shape.init_std, generator=generator)
    return model.float()
