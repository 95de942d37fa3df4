"""A model family of one's own: Mistral without a sliding window, which is Llama by another name.

A `Family` is the `model_type` of config.json and two functions. The first reads config.json and
refuses what the model must not have; the second gives the table of parameters: the names of each
in Megatron and in the Hugging Face files, its shape and how it is split. A decoder of the usual
build composes the rules of `models/decoder.py`.
"""

from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.decoder import decoder_rules, mlp_rules
from megatron_async.models.families import Family


def architecture(config: ConfigReader) -> Architecture:
    config.refuse("sliding_window")
    config.refuse("hidden_act", (None, "silu"))
    return config.dense()


FAMILY = Family("mistral", architecture, decoder_rules(mlp_rules))
