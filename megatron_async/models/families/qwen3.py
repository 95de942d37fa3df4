"""Describes Qwen3: norms on query and key heads, no bias."""

from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.decoder import decoder_rules, mlp_rules
from megatron_async.models.families import Family


def _architecture(config: ConfigReader) -> Architecture:
    config.refuse("use_sliding_window")
    config.refuse("attention_bias")
    config.refuse("hidden_act", (None, "silu"))
    return config.dense(qk_norm=True)


FAMILY = Family("qwen3", _architecture, decoder_rules(mlp_rules))
