"""Mixtral: experts w1 (gate), w3 (up), w2 (down) in every layer, their weights summing to 1."""

from megatron_async.models.architecture import Architecture, ConfigReader, Experts
from megatron_async.models.decoder import decoder_rules, expert_rules
from megatron_async.models.families import Family
from megatron_async.models.shards import Rule


def _architecture(config: ConfigReader) -> Architecture:
    config.refuse("sliding_window")
    config.refuse("hidden_act", (None, "silu"))
    config.refuse("router_jitter_noise", (None, 0, 0.0))
    experts = Experts(
        num=config.integer("num_local_experts"),
        top_k=config.integer("num_experts_per_tok"),
        ffn_size=config.integer("intermediate_size"),
        normalize_top_k=True,
    )
    return config.dense(experts=experts)


def _feed_forward(architecture: Architecture) -> list[Rule]:
    return expert_rules(architecture, "block_sparse_moe", gate="w1", up="w3", down="w2")


FAMILY = Family("mixtral", _architecture, decoder_rules(_feed_forward))
