"""Describes Qwen2 and Qwen2.5: query, key and value projections have a bias. In models below 7B,
the output head shares its weights with the embedding."""

from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.decoder import decoder_rules, mlp_rules
from megatron_async.models.families import Family


def _architecture(config: ConfigReader) -> Architecture:
    config.refuse("use_sliding_window")
    config.refuse("hidden_act", (None, "silu"))
    return config.dense(qkv_bias=True)


FAMILY = Family("qwen2", _architecture, decoder_rules(mlp_rules))
