"""Describes Mixtral: every layer has experts with the tensors w1 (gate), w3 (up) and w2 (down), and
the weights of a token's experts sum to 1."""

from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.decoder import decoder_rules, expert_rules
from megatron_async.models.families import Family
from megatron_async.models.shards import Rule


def _architecture(config: ConfigReader) -> Architecture:
    config.refuse("sliding_window")
    config.refuse("hidden_act", (None, "silu"))
    config.refuse("router_jitter_noise", (None, 0, 0.0))
    return config.dense(
        experts=config.experts("num_local_experts", "intermediate_size", normalize_top_k=True),
        rope=config.rope(default_theta=1e6),
        norm_eps=config.number("rms_norm_eps", 1e-5),
    )


def _feed_forward(architecture: Architecture) -> list[Rule]:
    return expert_rules(architecture, "block_sparse_moe", gate="w1", up="w3", down="w2")


FAMILY = Family("mixtral", _architecture, decoder_rules(_feed_forward))
