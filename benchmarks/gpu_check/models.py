"""Creates random models in Hugging Face format, batches for them, and trainers on them.

Invariants
- transformers is not needed: this module writes config.json, and the model families define the
  names and shapes of tensors.
- The same seed gives the same model and the same batch on one device.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

if TYPE_CHECKING:
    from megatron_async.trainer.step import PolicyTrainer
    from megatron_async.trajectory.batch import TokenBatch

GQA: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
WINDOW: Mapping[str, Any] = {
    **GQA,
    "model_type": "gemma3_text",
    "sliding_window": 100,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "rope_local_base_freq": 10_000.0,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}
QWEN2_1B: Mapping[str, Any] = {  # shape of Qwen2.5-1.5B
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
_TOY = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 512, "num_attention_heads": 4}


def toy(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config of the same kind of model that is small enough for a trial run."""
    layers = min(4, config["num_hidden_layers"])
    small = {**config, **_TOY, "num_hidden_layers": layers, "num_key_value_heads": 2}
    if "head_dim" in config:
        small |= {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6}
    return small


def write_model(directory: Path, config: Mapping[str, Any], device: str, std: float) -> Path:
    """Write config.json and one file of random weights into `directory`; return `directory`.

    Weights are drawn from a normal distribution with standard deviation `std`. Weights of norms are
    ones, or zeros if the architecture adds one to them.
    """
    from safetensors.torch import save_file

    from megatron_async.models.families import read_architecture
    from megatron_async.models.model_files import SINGLE_FILE, expected_tensors

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(dict(config)))
    architecture = read_architecture(str(directory), "")
    dtype = getattr(torch, config["torch_dtype"])
    generator = torch.Generator(device).manual_seed(0)
    tensors = {}
    for name, shape in expected_tensors(architecture):
        if architecture.tied_head and name == "lm_head.weight":
            continue
        if name.endswith("norm.weight"):
            fill = 0.0 if architecture.zero_centered_norm else 1.0
            tensors[name] = torch.full(shape, fill, dtype=dtype)
            continue
        values = std * torch.randn(shape, generator=generator, device=device)
        tensors[name] = values.to("cpu", dtype)
    save_file(tensors, directory / SINGLE_FILE)
    return directory


def ragged_batch(
    lengths_S: Sequence[int], vocab: int, *, group_size: int = 4, step: int = 0
) -> TokenBatch:
    """Return a batch of sequences of these lengths with random tokens and rewards.

    The first quarter of each sequence is its prompt.
    """
    from megatron_async.trajectory.batch import TokenBatch

    rng = np.random.default_rng(1000 + step)
    lengths = np.asarray(lengths_S)
    count, total = len(lengths), int(lengths.sum())
    cu_S1 = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    prompts = np.maximum(1, lengths // 4)
    position_T = np.arange(total) - np.repeat(cu_S1[:-1], lengths)
    mask_T = position_T >= np.repeat(prompts, lengths)
    return TokenBatch(
        step=step,
        token_ids_T=rng.integers(0, vocab, total).astype(np.int32),
        loss_mask_T=mask_T.astype(np.float32),
        rollout_logprobs_T=np.where(mask_T, -np.log(vocab), 0).astype(np.float32),
        version_T=np.where(mask_T, step, -1).astype(np.int32),
        lag_T=np.zeros(total, np.int32),
        cu_seqlens_S1=cu_S1,
        rewards_S=rng.integers(0, 2, count).astype(np.float32),
        group_ids_S=np.repeat(np.arange(count // group_size), group_size).astype(np.int64),
        trajectory_ids_S=np.arange(count, dtype=np.int64),
        prompt_lengths_S=prompts.astype(np.int32),
        truncated_S=np.zeros(count, np.bool_),
        resumed_S=np.zeros(count, np.bool_),
    )


@contextmanager
def trainer_on(
    directory: Path, purpose: Literal["rl", "sft"] = "rl", /, **changes: Any
) -> Iterator[PolicyTrainer]:
    """Yield a trainer of one rank with local layers, with the environment variables of `train`.

    Args:
        directory: Directory of the model.
        purpose: `rl` or `sft`.
        **changes: Settings of the run.
    """
    from megatron_async.config import build_config
    from megatron_async.config.load import merge
    from megatron_async.launcher.environment import trainer_environment
    from megatron_async.trainer.device import device_adapter
    from megatron_async.trainer.parallel import destroy_parallel, init_parallel
    from megatron_async.trainer.step import PolicyTrainer

    os.environ.update(trainer_environment(os.environ, one_machine=True))
    base = {"model": {"path": str(directory), "attention_backend": "sdpa"}}
    config = build_config(merge(base, changes))
    with device_adapter():
        init_parallel(config.parallel, config.trainer, config.seed)
        try:
            yield PolicyTrainer(config, purpose=purpose)
        finally:
            destroy_parallel()
