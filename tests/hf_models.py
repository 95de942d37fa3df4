"""Provides small random Hugging Face models of every supported family, and their reference
log-probs.

The range of the weights is wide enough that log-probs spread over tens of nats. Therefore the
effect of a wrong head, rope or norm is far larger than float32 rounding.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short enough that all three bands of the scaling occur at a head dimension of 8.
    "original_max_position_embeddings": 64,
}

# Cases whose two KV heads cannot be divided among four ranks.
NARROW_CASES = ("qwen2_yarn",)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama3": ("llama", "Llama", {"head_dim": 8, "rope_parameters": _LLAMA3_ROPE}),
    "llama_tied": (
        "llama",
        "Llama",
        {"head_dim": 8, "rope_parameters": _LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
    "qwen2": ("qwen2", "Qwen2", {}),
    "qwen2_tied": ("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "Qwen3", {"head_dim": 8}),
    # All bands of YaRN occur at a head dimension of 8. Most sequences exceed 16 tokens.
    "qwen2_yarn": (
        "qwen2",
        "Qwen2",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "beta_fast": 2.0,
                "beta_slow": 0.25,
            },
        },
    ),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {
            "head_dim": 8,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 12,
        },
    ),
}
# A family that a user has defined: examples/own_family.
OWN_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mistral": ("mistral", "Mistral", {"sliding_window": None}),
}
EXPERT_CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mixtral": ("mixtral", "Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": (
        "qwen3_moe",
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": False,
        },
    ),
}


def build_hf_model(case: str, seed: int = 0, **overrides: Any) -> Any:
    """Build a random model in float32; biases and norm weights are random too."""
    module_name, class_name, settings = {**CASES, **EXPERT_CASES, **OWN_CASES}[case]
    folder = module_name
    config_module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    model_module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config_class = getattr(
        config_module, f"{class_name}TextConfig" if folder == "gemma3" else f"{class_name}Config"
    )
    torch.manual_seed(seed)
    config = config_class(**{**SHAPE, **settings, **overrides})
    model = getattr(model_module, f"{class_name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def save_hf_model(case: str, folder: Path, seed: int = 0, **overrides: Any) -> Any:
    """Build a model with `build_hf_model`, save it to `folder` and return it."""
    model = build_hf_model(case, seed, **overrides)
    model.save_pretrained(folder)
    return model


def random_stream(lengths: Sequence[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random token IDs [T] and cu_seqlens [S + 1] of sequences with these lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (sum(lengths),), generator=generator)
    return ids, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@torch.no_grad()
def reference_logprobs(
    model: Any, token_ids_T: Tensor, cu_seqlens_S1: Tensor, temperature: float
) -> Tensor:
    """Return log π(token | its sequence so far) by transformers, one sequence at a time, [T]; 0 for
    the first token of each sequence."""
    out_T = torch.zeros(token_ids_T.shape[0])
    borders = cu_seqlens_S1.tolist()
    for start, stop in pairwise(borders):
        ids = token_ids_T[start:stop]
        logprobs_LV = (model(ids[None]).logits[0].float() / temperature).log_softmax(-1)
        out_T[start + 1 : stop] = logprobs_LV[:-1].gather(1, ids[1:, None])[:, 0]
    return out_T


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a Hugging Face directory, from all its files."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found
