"""Builds Megatron's TransformerConfig from an `Architecture` and the parallel settings.

Invariants
- The TransformerConfig is the same on all devices, except for the precision and for the choice of
  fused kernels, which depends on CUDA and on the result of `capabilities.choose`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_async.config.model import ModelConfig, ParallelConfig, Recompute, TrainerConfig
from megatron_async.models.architecture import Architecture
from megatron_async.trainer.capabilities import Backends, parameter_dtype
from megatron_async.trainer.device import has_cuda


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU of `x` in the approximation by tanh (Hendrycks and Gimpel, 2016, section 2)."""
    return F.gelu(x, approximate="tanh")


ALIKE: Final[Mapping[str, object]] = MappingProxyType(
    {
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "init_method": torch.nn.init.zeros_,
        "output_layer_init_method": torch.nn.init.zeros_,
        "embedding_init_method": torch.nn.init.zeros_,
        "use_cpu_initialization": False,
        "expert_tensor_parallel_size": 1,
        # Microbatches differ in length, so pipeline stages send each other the shapes.
        "variable_seq_lengths": True,
        # Megatron checks the dispatcher even if the model has no experts. Its default dispatcher
        # does not support `variable_seq_lengths`.
        "moe_token_dispatcher_type": "alltoall",
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        # Megatron must only sum gradients: the loss is already divided by counts of the whole
        # minibatch.
        "calculate_per_token_loss": True,
    }
)
"""Megatron's settings that are the same for every model, parallel layout and device."""


def softmax_scale(a: Architecture) -> float | None:
    """Return the scale of attention scores; None for Megatron's default, 1 / sqrt(head_dim).

    The scale includes YaRN's factor of attention scores. YaRN multiplies sines and cosines by the
    square root of this factor instead, which has the same effect, but Megatron's fused rotary
    embedding ignores that for packed sequences.
    """
    if a.rope.score_scale == 1:
        return a.attention_scale
    return (a.attention_scale or a.head_dim**-0.5) * a.rope.score_scale


def transformer_config(
    architecture: Architecture,
    model: ModelConfig,
    parallel: ParallelConfig,
    trainer: TrainerConfig,
    backends: Backends,
) -> TransformerConfig:
    """Return Megatron's TransformerConfig for this model and layout.

    Parameters are initialized with zeros, because weights are loaded later. Megatron's
    initialization cannot be left out: it also marks the parameters that are split over tensor
    ranks, and the gradient norm needs these marks.
    """
    a = architecture
    dtype = parameter_dtype(model)
    settings: dict[str, object] = {
        **ALIKE,
        "num_layers": a.num_layers,
        "hidden_size": a.hidden_size,
        "ffn_hidden_size": a.ffn_size,
        "num_attention_heads": a.num_heads,
        "num_query_groups": a.num_kv_heads,
        "kv_channels": a.head_dim,
        "softmax_scale": softmax_scale(a),
        "layernorm_epsilon": a.norm_eps,
        "layernorm_zero_centered_gamma": a.zero_centered_norm,
        "qk_layernorm": a.qk_norm,
        "add_qkv_bias": a.qkv_bias,
        "activation_func": F.silu if a.activation == "silu" else gelu_tanh,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "sequence_parallel": parallel.sequence,
        "bias_activation_fusion": has_cuda() and a.activation == "silu",
        # There is no bias and no dropout, so only one addition could be fused. For that, torch
        # would compile 8 variants.
        "bias_dropout_fusion": False,
        "apply_rope_fusion": backends.transformer_engine,
        "gradient_accumulation_fusion": backends.gradient_accumulation_fusion,
    }
    if a.local_window is not None:
        settings["window_size"] = (a.local_window - 1, 0)
        settings["window_attn_skip_freq"] = [int(local) for local in a.local_layers]
    if a.experts is not None:
        settings.update(
            num_moe_experts=a.experts.num,
            moe_router_topk=a.experts.top_k,
            moe_ffn_hidden_size=a.experts.ffn_size,
            # A softmax over the chosen experts only is equal to a softmax over all experts whose
            # chosen values are divided by their sum (`normalize_top_k`).
            moe_router_pre_softmax=not a.experts.normalize_top_k,
            moe_router_load_balancing_type="none",
            moe_router_dtype="fp32",
            moe_grouped_gemm=backends.experts == "transformer_engine",
        )
    settings.update(_recomputation(trainer.recompute))
    return TransformerConfig(**settings)


def _recomputation(recompute: Recompute) -> dict[str, Any]:
    """Return Megatron's settings for `trainer.recompute` (activation recomputation)."""
    if recompute == "none":
        return {}
    if recompute == "feed_forward":
        # Each layer has one of these two modules: an MLP, or experts ("moe").
        return {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}
    settings = {"recompute_granularity": "full", "recompute_method": "block"}
    if recompute == "all":
        return settings | {"recompute_method": "uniform", "recompute_num_layers": 1}
    return settings | {"recompute_num_layers": recompute}
