"""Provides chat templates and special tokens of real model families, over a character tokenizer."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from megatron_async.models.tiny_model import character_tokenizer

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "<|im_start|>system\nYou are helpful<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
)
FAMILIES = {
    "plain": ((), ("<eos>",)),
    "smollm2": (CHATML, ("<|im_end|>", "<|endoftext|>")),
    "qwen2_5": (CHATML, ("<|im_end|>", "<|endoftext|>")),
    "qwen3": (CHATML, ("<|im_end|>", "<|endoftext|>")),
    "llama3": (LLAMA, ("<|eot_id|>",)),
    "llama3_1": (LLAMA, ("<|eot_id|>", "<|eom_id|>")),
    "gemma3": (("<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",)),
}


def template_of(family: str) -> str | None:
    """Return the chat template of a model family; skip the test if `trl`, its source, is missing.

    The family `plain` does not have a template.
    """
    if family == "plain":
        return None
    if family == "smollm2":
        return SMOLLM2
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl, which has the families' templates, is not installed")
    return (Path(spec.origin).parent / "chat_templates" / f"{family}.jinja").read_text()


def family_tokenizer(family: str) -> tuple[Any, tuple[int, ...]]:
    """Return a tokenizer with the template and special tokens of a family, and its stop tokens."""
    special, stops = FAMILIES[family]
    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(t, normalized=False) for t in special]}
    )
    if "<|begin_of_text|>" in special:
        tokenizer.bos_token = "<|begin_of_text|>"
    elif family == "gemma3":
        tokenizer.bos_token = "<pad>"
    tokenizer.chat_template = template_of(family)
    return tokenizer, tuple(tokenizer.convert_tokens_to_ids(stop) for stop in stops)
