"""A user-defined model family: Mistral without a sliding window, which has the structure of Llama.

A `Family` has the `model_type` of config.json and two functions. The first reads config.json and
refuses settings that the model does not implement. The second returns the table of parameters: each
parameter's names in Megatron and in Hugging Face files, its shape, and how it is split over ranks.
A decoder of the usual structure composes this table from the rules in `models/decoder.py`.
"""

from megatron_async.models.architecture import Architecture, ConfigReader
from megatron_async.models.decoder import decoder_rules, mlp_rules
from megatron_async.models.families import Family


def architecture(config: ConfigReader) -> Architecture:
    config.refuse("sliding_window")
    config.refuse("hidden_act", (None, "silu"))
    return config.dense()


FAMILY = Family("mistral", architecture, decoder_rules(mlp_rules))
