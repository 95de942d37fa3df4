"""Describes Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3's attention and experts, no shared expert."""

from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.decoder import decoder_rules, expert_rules
from megatron_async.models.families import Family
from megatron_async.models.shards import Rule


def _architecture(config: ConfigReader) -> Architecture:
    config.refuse("use_sliding_window")
    config.refuse("attention_bias")
    config.refuse("hidden_act", (None, "silu"))
    config.refuse("decoder_sparse_step", (None, 1))
    config.refuse("mlp_only_layers", (None, []))
    # transformers 5 writes the key num_local_experts; the published checkpoints have num_experts.
    count_key = "num_experts" if "num_experts" in config.raw else "num_local_experts"
    normalize = config.flag("norm_topk_prob")
    experts = config.experts(count_key, "moe_intermediate_size", normalize_top_k=normalize)
    return config.dense(qk_norm=True, experts=experts)


def _feed_forward(architecture: Architecture) -> list[Rule]:
    return expert_rules(architecture, "mlp")


FAMILY = Family("qwen3_moe", _architecture, decoder_rules(_feed_forward))
