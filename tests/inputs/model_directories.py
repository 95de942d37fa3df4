"""Writes small model directories of every family, without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from megatron_async.models.families import read_architecture
from megatron_async.models.model_files import expected_tensors
from megatron_async.models.tiny_model import VOCAB_SIZE, write_character_tokenizer

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "dtype": "float32",
    "tie_word_embeddings": False,
}
_ROPE = {"rope_theta": 10000.0, "rope_type": "default"}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        **_SHAPE,
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen2": {
        **_SHAPE,
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "use_sliding_window": False,
    },
    "qwen3": {**_SHAPE, "model_type": "qwen3", "rope_parameters": _ROPE, "attention_bias": False},
    "qwen3_moe": {
        **_SHAPE,
        "model_type": "qwen3_moe",
        "rope_parameters": _ROPE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 6,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    },
    "mixtral": {
        **_SHAPE,
        "model_type": "mixtral",
        "rope_parameters": _ROPE,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "gemma3_text": {
        **_SHAPE,
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE},
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "query_pre_attn_scalar": 4,
        "hidden_activation": "gelu_pytorch_tanh",
    },
}


def write_model(folder: Path, family: str, **changes: Any) -> Path:
    """Write a model directory with config.json, weights that are all 1, and a tokenizer; return the
    directory.

    `changes` override entries of config.json.
    """
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIGS[family] | changes))
    write_character_tokenizer(folder)
    tensors = {
        name: np.ones(shape, np.float32)
        for name, shape in expected_tensors(read_architecture(folder))
    }
    save_file(tensors, folder / "model.safetensors")
    return folder
