"""Describes the text model of Gemma 3: local and global attention, and norms after attention and
feed-forward.

Every sixth layer is global; the others attend within a sliding window and have a separate rope.
Norm weights are offsets from 1, embeddings are scaled by sqrt(hidden size), and the output head
shares its weights with the embedding.
"""

from megatron_async.models.architecture import Architecture, ConfigReader, Rope
from megatron_async.models.decoder import decoder_rules, mlp_rules, norm_rule
from megatron_async.models.families import Family
from megatron_async.models.shards import Rule


def _architecture(config: ConfigReader) -> Architecture:
    """Read the architecture from a config.json; raise UserError for unsupported settings."""
    config.refuse("attention_bias")
    config.refuse("attn_logit_softcapping")
    config.refuse("use_bidirectional_attention")
    config.refuse("hidden_activation", (None, "gelu_pytorch_tanh"))
    global_rope, local_rope = _ropes(config)
    # YaRN scales attention scores. With one of two ropes it would scale those of only some layers,
    # which is not implemented.
    if "yarn" in (global_rope.kind, local_rope.kind):
        raise config.error("rope_type", "yarn", "another type for gemma3_text")
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
    """Return the rope of global layers and the rope of local layers, from a config.json in the form
    of transformers 4 or 5.

    As in transformers, `rope_scaling` changes only the global rope.
    """
    key, kinds = "rope_parameters", ("full_attention", "sliding_attention")
    both = config.mapping(key, config.raw.get(key) or {kind: {} for kind in kinds})
    full, local = (config.mapping(f"{key}.{kind}", both.get(kind)) for kind in kinds)
    scaling = config.mapping("rope_scaling", config.raw.get("rope_scaling") or {})
    theta, local_theta = (
        config.number("rope_theta", 1e6),
        config.number("rope_local_base_freq", 1e4),
    )
    full_key = "rope_scaling" if scaling else f"{key}.full_attention"
    return (
        config.rope_from({"rope_theta": theta, **full, **scaling}, full_key),
        config.rope_from({"rope_theta": local_theta, **local}, f"{key}.sliding_attention"),
    )


def _local_layers(config: ConfigReader) -> tuple[bool, ...]:
    """Return, for each layer, whether its attention is local."""
    layers, kinds = config.layers(), config.raw.get("layer_types")
    if kinds is None:
        period = config.integer("sliding_window_pattern", 6)
        return tuple((layer + 1) % period != 0 for layer in range(layers))
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(k not in known for k in kinds):
        raise config.error(
            "layer_types", kinds, f"a list of {layers} values, each {' or '.join(known)}"
        )
    return tuple(kind == "sliding_attention" for kind in kinds)


def _feed_forward(architecture: Architecture) -> list[Rule]:
    """Return the shard rules of a layer's feed-forward, with the norms after attention and
    feed-forward."""
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
