"""Describes Llama 2 to 3.3: grouped key/value heads and llama3 rope scaling. In the small models of
3.2, the output head shares its weights with the embedding."""

from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.decoder import decoder_rules, mlp_rules
from megatron_async.models.families import Family


def _architecture(config: ConfigReader) -> Architecture:
    config.refuse("attention_bias")
    config.refuse("mlp_bias")
    config.refuse("hidden_act", (None, "silu"))
    return config.dense()


FAMILY = Family("llama", _architecture, decoder_rules(mlp_rules))
