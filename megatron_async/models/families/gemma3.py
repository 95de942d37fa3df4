"""Gemma 3, text only: local and global attention layers, norms after attention and feed-forward.

Every sixth layer is global; the others see a sliding window and have a rope of their own. Norm
weights are offsets from 1, embeddings are scaled by sqrt(hidden size), the head is tied.
"""

from megatron_async.models.architecture import Architecture, ConfigReader, Rope
from megatron_async.models.decoder import decoder_rules, mlp_rules, norm_rule
from megatron_async.models.families import Family
from megatron_async.models.shards import Rule


def _architecture(config: ConfigReader) -> Architecture:
    config.refuse("attention_bias")
    config.refuse("attn_logit_softcapping")
    config.refuse("final_logit_softcapping")
    config.refuse("use_bidirectional_attention")
    config.refuse("hidden_activation", (None, "gelu_pytorch_tanh"))
    global_rope, local_rope = _ropes(config)
    return config.dense(
        rope=global_rope,
        local_rope=local_rope,
        local_window=config.integer("sliding_window", 4096),
        local_layers=_local_layers(config),
        tied_head=config.flag("tie_word_embeddings", True),
        head_dim=config.integer("head_dim", 256),
        attention_scale=config.number("query_pre_attn_scalar", 256) ** -0.5,
        activation="gelu_tanh",
        qk_norm=True,
        post_norms=True,
        zero_centered_norm=True,
        scale_embeddings=True,
    )


def _ropes(config: ConfigReader) -> tuple[Rope, Rope]:
    """(global, local), as transformers 5 and as transformers 4 write them."""
    settings = config.raw.get("rope_parameters")
    if settings is not None:
        return (
            config.rope_from(settings["full_attention"]),
            config.rope_from(settings["sliding_attention"]),
        )
    scaling = config.raw.get("rope_scaling") or {}
    full = {**scaling, "rope_theta": config.number("rope_theta", 1e6)}
    return config.rope_from(full), Rope(theta=config.number("rope_local_base_freq", 1e4))


def _local_layers(config: ConfigReader) -> tuple[bool, ...]:
    kinds = config.raw.get("layer_types")
    if kinds is not None:
        return tuple(kind == "sliding_attention" for kind in kinds)
    period = config.integer("sliding_window_pattern", 6)
    return tuple((layer + 1) % period != 0 for layer in range(config.integer("num_hidden_layers")))


def _feed_forward(architecture: Architecture) -> list[Rule]:
    size = architecture.hidden_size
    return [
        norm_rule(
            ("self_attention.linear_proj.post_layernorm.weight",),
            "post_attention_layernorm.weight",
            size,
        ),
        *mlp_rules(architecture, "pre_feedforward_layernorm.weight"),
        norm_rule(
            ("mlp.linear_fc2.post_layernorm.weight",), "post_feedforward_layernorm.weight", size
        ),
    ]


FAMILY = Family("gemma3_text", _architecture, decoder_rules(_feed_forward))
