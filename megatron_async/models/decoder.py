"""The rules that decoder families share: embedding, attention, feed-forward, experts, norms, head.

A family composes these and names what differs. Each parameter is listed with the name it has in
local Megatron layers and, where it differs, in Transformer Engine layers (which hold a norm
inside the linear layer that follows it).
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from megatron_async.models.architecture import Architecture
from megatron_async.models.shards import LayerPosition, Rule, ShardLayout

_LAYER = "decoder.layers.{layer}."
_HF_LAYER = "model.layers.{layer}."


def _layer_rule(
    layout: ShardLayout,
    parameters: tuple[str, ...],
    tensors: Mapping[str, tuple[int, ...]],
    *,
    groups: int = 0,
    expert: bool = False,
) -> Rule:
    """`tensors`: the names in the checkpoint, and the shape of each."""
    return Rule(
        parameters=tuple(_LAYER + name for name in parameters),
        tensors=tuple(_HF_LAYER + name for name in tensors),
        shapes=tuple(tensors.values()),
        layout=layout,
        groups=groups,
        expert=expert,
    )


def norm_rule(parameters: tuple[str, ...], tensor: str, size: int) -> Rule:
    """A norm's weight inside a layer."""
    return _layer_rule(ShardLayout.REPLICATED, parameters, {tensor: (size,)})


def embedding_rule(a: Architecture) -> Rule:
    """Word embedding (first stage)."""
    return Rule(
        parameters=("embedding.word_embeddings.weight",),
        tensors=("model.embed_tokens.weight",),
        shapes=((a.vocab_size, a.hidden_size),),
        layout=ShardLayout.VOCAB,
        place=LayerPosition.FIRST,
    )


def head_rules(a: Architecture) -> list[Rule]:
    """Final norm and head (last stage); a tied head of its own stage is a copy of the embedding."""
    return [
        Rule(
            parameters=("decoder.final_layernorm.weight",),
            tensors=("model.norm.weight",),
            shapes=((a.hidden_size,),),
            layout=ShardLayout.REPLICATED,
            place=LayerPosition.LAST,
        ),
        replace(
            embedding_rule(a),
            parameters=("output_layer.weight",),
            tensors=("model.embed_tokens.weight" if a.tied_head else "lm_head.weight",),
            place=LayerPosition.LAST,
            exported=not a.tied_head,
        ),
    ]


def attention_rules(a: Architecture) -> list[Rule]:
    """Input norm, fused QKV (bias where the family has one), QK norms, output projection."""
    q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim

    def qkv(kind: str, *columns: int) -> Rule:
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        return _layer_rule(
            ShardLayout.QKV,
            (f"self_attention.linear_qkv.{kind}",),
            {f"self_attn.{part}_proj.{kind}": (rows[part], *columns) for part in rows},
            groups=a.num_kv_heads,
        )

    norms = ("q", "k") if a.qk_norm else ()
    return [
        norm_rule(
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            "input_layernorm.weight",
            a.hidden_size,
        ),
        qkv("weight", a.hidden_size),
        *([qkv("bias")] if a.qkv_bias else []),
        *(
            norm_rule(
                (f"self_attention.{part}_layernorm.weight",),
                f"self_attn.{part}_norm.weight",
                a.head_dim,
            )
            for part in norms
        ),
        _layer_rule(
            ShardLayout.COLUMNS,
            ("self_attention.linear_proj.weight",),
            {"self_attn.o_proj.weight": (a.hidden_size, q_rows)},
        ),
    ]


def _gated_rules(
    a: Architecture,
    width: int,
    fc1: tuple[str, ...],
    fc2: tuple[str, ...],
    tensors: tuple[str, str, str],
    *,
    expert: bool = False,
) -> list[Rule]:
    """Fused gate/up and down projection; `tensors`: gate, up and down in the checkpoint."""
    gate, up, down = tensors
    rows = (width, a.hidden_size)
    return [
        _layer_rule(ShardLayout.GATE_UP, fc1, {gate: rows, up: rows}, expert=expert),
        _layer_rule(ShardLayout.COLUMNS, fc2, {down: rows[::-1]}, expert=expert),
    ]


def mlp_rules(a: Architecture, norm: str = "post_attention_layernorm.weight") -> list[Rule]:
    """Norm before the feed-forward, fused gate/up, down projection."""
    return [
        norm_rule(
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"), norm, a.hidden_size
        ),
        *_gated_rules(
            a,
            a.ffn_size,
            ("mlp.linear_fc1.weight",),
            ("mlp.linear_fc2.weight",),
            ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"),
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
    assert a.experts is not None
    expert = f"{block}.experts.{{expert}}."
    local = "mlp.experts.local_experts.{expert}."
    return [
        norm_rule(("pre_mlp_layernorm.weight",), "post_attention_layernorm.weight", a.hidden_size),
        _layer_rule(
            ShardLayout.REPLICATED,
            ("mlp.router.weight",),
            {f"{block}.gate.weight": (a.experts.num, a.hidden_size)},
        ),
        *_gated_rules(
            a,
            a.experts.ffn_size,
            (f"{local}linear_fc1.weight", "mlp.experts.linear_fc1.weight{expert}"),
            (f"{local}linear_fc2.weight", "mlp.experts.linear_fc2.weight{expert}"),
            (f"{expert}{gate}.weight", f"{expert}{up}.weight", f"{expert}{down}.weight"),
            expert=True,
        ),
    ]


def decoder_rules(
    feed_forward: Callable[[Architecture], list[Rule]],
) -> Callable[[Architecture], tuple[Rule, ...]]:
    """Embedding, attention and `feed_forward` of every layer, head."""

    def rules(a: Architecture) -> tuple[Rule, ...]:
        return (embedding_rule(a), *attention_rules(a), *feed_forward(a), *head_rules(a))

    return rules
