"""The rules that decoder families share: embedding, attention, feed-forward, experts, norms, head.

A family composes these and names what differs. Each parameter is listed with the name it has in
local Megatron layers and, where it differs, in Transformer Engine layers (which hold a norm
inside the linear layer that follows it).
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_async.models.architecture import Architecture
from megatron_async.models.shards import Place, Rule, ShardLayout

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _layer_rule(
    parameters: tuple[str, ...],
    tensors: tuple[str, ...],
    shapes: list[tuple[int, ...]],
    layout: ShardLayout,
    *,
    groups: int = 0,
    expert: bool = False,
) -> Rule:
    return Rule(
        parameters=tuple(_LAYER + name for name in parameters),
        tensors=tuple(_HF_LAYER + name for name in tensors),
        shapes=tuple(shapes),
        layout=layout,
        groups=groups,
        expert=expert,
    )


def norm_rule(parameters: tuple[str, ...], tensor: str, size: int) -> Rule:
    """A norm's weight inside a layer."""
    return _layer_rule(parameters, (tensor,), [(size,)], ShardLayout.REPLICATED)


def embedding_rules(a: Architecture) -> list[Rule]:
    """Word embedding (first stage)."""
    return [
        Rule(
            parameters=("embedding.word_embeddings.weight",),
            tensors=("model.embed_tokens.weight",),
            shapes=((a.vocab_size, a.hidden_size),),
            layout=ShardLayout.VOCAB,
            place=Place.FIRST,
        )
    ]


def head_rules(a: Architecture) -> list[Rule]:
    """Final norm and head (last stage); a tied head of its own stage is a copy of the embedding."""
    return [
        Rule(
            parameters=("decoder.final_layernorm.weight",),
            tensors=("model.norm.weight",),
            shapes=((a.hidden_size,),),
            layout=ShardLayout.REPLICATED,
            place=Place.LAST,
        ),
        Rule(
            parameters=("output_layer.weight",),
            tensors=("model.embed_tokens.weight" if a.tied_head else "lm_head.weight",),
            shapes=((a.vocab_size, a.hidden_size),),
            layout=ShardLayout.VOCAB,
            place=Place.LAST,
            exported=not a.tied_head,
        ),
    ]


def attention_rules(a: Architecture) -> list[Rule]:
    """Input norm, fused QKV (bias where the family has one), QK norms, output projection."""
    q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    qkv = ("self_attn.q_proj.", "self_attn.k_proj.", "self_attn.v_proj.")
    rows = (q_rows, kv_rows, kv_rows)
    rules = [
        norm_rule(
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            "input_layernorm.weight",
            a.hidden_size,
        ),
        _layer_rule(
            ("self_attention.linear_qkv.weight",),
            tuple(name + "weight" for name in qkv),
            [(count, a.hidden_size) for count in rows],
            ShardLayout.QKV,
            groups=a.num_kv_heads,
        ),
    ]
    if a.qkv_bias:
        rules.append(
            _layer_rule(
                ("self_attention.linear_qkv.bias",),
                tuple(name + "bias" for name in qkv),
                [(count,) for count in rows],
                ShardLayout.QKV,
                groups=a.num_kv_heads,
            )
        )
    if a.qk_norm:
        for letter in ("q", "k"):
            rules.append(
                norm_rule(
                    (f"self_attention.{letter}_layernorm.weight",),
                    f"self_attn.{letter}_norm.weight",
                    a.head_dim,
                )
            )
    rules.append(
        _layer_rule(
            ("self_attention.linear_proj.weight",),
            ("self_attn.o_proj.weight",),
            [(a.hidden_size, q_rows)],
            ShardLayout.COLUMNS,
        )
    )
    return rules


def mlp_rules(a: Architecture, norm: str = "post_attention_layernorm.weight") -> list[Rule]:
    """Norm before the feed-forward, fused gate/up, down projection."""
    return [
        norm_rule(
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), norm, a.hidden_size
        ),
        _layer_rule(
            ("mlp.linear_fc1.weight",),
            ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
            [(a.ffn_size, a.hidden_size)] * 2,
            ShardLayout.GATE_UP,
        ),
        _layer_rule(
            ("mlp.linear_fc2.weight",),
            ("mlp.down_proj.weight",),
            [(a.hidden_size, a.ffn_size)],
            ShardLayout.COLUMNS,
        ),
    ]


def expert_rules(
    a: Architecture,
    block: str,
    gate: str = "gate_proj",
    up: str = "up_proj",
    down: str = "down_proj",
) -> list[Rule]:
    """Norm, router and experts. `block` is the feed-forward's name in the checkpoint.

    Expert tensor parallelism is not used, so that experts are whole on their rank.
    """
    if a.experts is None:
        raise ValueError(f"{a.family} has no experts")
    width = a.experts.ffn_size
    expert = f"{block}.experts.{{expert}}."
    return [
        norm_rule(("pre_mlp_layernorm.weight",), "post_attention_layernorm.weight", a.hidden_size),
        _layer_rule(
            ("mlp.router.weight",),
            (f"{block}.gate.weight",),
            [(a.experts.num, a.hidden_size)],
            ShardLayout.REPLICATED,
        ),
        _layer_rule(
            (
                "mlp.experts.local_experts.{expert}.linear_fc1.weight",
                "mlp.experts.linear_fc1.weight{expert}",
            ),
            (f"{expert}{gate}.weight", f"{expert}{up}.weight"),
            [(width, a.hidden_size)] * 2,
            ShardLayout.GATE_UP,
            expert=True,
        ),
        _layer_rule(
            (
                "mlp.experts.local_experts.{expert}.linear_fc2.weight",
                "mlp.experts.linear_fc2.weight{expert}",
            ),
            (f"{expert}{down}.weight",),
            [(a.hidden_size, width)],
            ShardLayout.COLUMNS,
            expert=True,
        ),
    ]


def decoder_rules(
    feed_forward: Callable[[Architecture], list[Rule]],
) -> Callable[[Architecture], tuple[Rule, ...]]:
    """Embedding, attention and `feed_forward` of every layer, head."""

    def rules(a: Architecture) -> tuple[Rule, ...]:
        return (*embedding_rules(a), *attention_rules(a), *feed_forward(a), *head_rules(a))

    return rules
