"""Provides the shard rules that decoder families share: embedding, attention, feed-forward, head.

A family combines these rules and passes the names that differ. Each parameter is listed with its
name in local Megatron layers and, where it differs, in Transformer Engine layers (which include a
norm in the linear layer that follows it).
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
    """Return the shard rule of a parameter that every layer has: its names, shapes and division
    over tensor ranks.

    Args:
        layout: How tensor ranks divide the parameter.
        parameters: Its Megatron name in a local layer (one without Transformer Engine) and, if that
            differs, its name in a Transformer Engine layer.
        tensors: The names, inside a layer, and shapes of its Hugging Face tensors.
        groups: Number of key/value heads of a QKV layout.
        expert: Whether each expert has such a parameter.
    """
    return Rule(
        parameters=tuple(_LAYER + name for name in parameters),
        tensors=tuple(_HF_LAYER + name for name in tensors),
        shapes=tuple(tensors.values()),
        layout=layout,
        groups=groups,
        expert=expert,
    )


def norm_rule(parameters: tuple[str, ...], tensor: str, size: int) -> Rule:
    """Return the shard rule of a norm's weight inside a layer: its names, shape and division over
    tensor ranks.

    Args:
        parameters: Its Megatron name in a local layer (one without Transformer Engine) and, if that
            differs, its name in a Transformer Engine layer.
        tensor: Its Hugging Face name inside a layer.
        size: Number of its elements.
    """
    return _layer_rule(ShardLayout.REPLICATED, parameters, {tensor: (size,)})


def embedding_rule(a: Architecture) -> Rule:
    """Return the shard rule of the word embedding, which the first pipeline stage has."""
    return Rule(
        parameters=("embedding.word_embeddings.weight",),
        tensors=("model.embed_tokens.weight",),
        shapes=((a.vocab_size, a.hidden_size),),
        layout=ShardLayout.VOCAB,
        place=LayerPosition.FIRST,
    )


def head_rules(a: Architecture) -> list[Rule]:
    """Return the shard rules of the final norm and the output head, which the last pipeline stage
    has.

    If the head is tied and the model has several stages, the last stage has a copy of the
    embedding.
    """
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
    """Return the shard rules of a layer's attention: input norm, fused QKV, QK norms, output
    projection.

    The fused QKV has a bias, and the norms of query and key heads exist, only if the family has
    them.
    """
    q_rows, kv_rows = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim

    def qkv(kind: str, *columns: int) -> Rule:
        rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
        return _layer_rule(
            ShardLayout.QKV,
            (f"self_attention.linear_qkv.{kind}",),
            {f"self_attn.{head}_proj.{kind}": (rows[head], *columns) for head in rows},
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
                (f"self_attention.{head}_layernorm.weight",),
                f"self_attn.{head}_norm.weight",
                a.head_dim,
            )
            for head in norms
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
    """Return the shard rules of a gated feed-forward: the fused gate/up projection and the down
    projection.

    Args:
        width: Width of the feed-forward.
        fc1: Megatron's names of the fused gate/up projection.
        fc2: Megatron's names of the down projection.
        tensors: Hugging Face names of the gate, up and down projections.
        expert: Whether it is the feed-forward of an expert.
    """
    gate, up, down = tensors
    rows = (width, a.hidden_size)
    return [
        _layer_rule(ShardLayout.GATE_UP, fc1, {gate: rows, up: rows}, expert=expert),
        _layer_rule(ShardLayout.COLUMNS, fc2, {down: rows[::-1]}, expert=expert),
    ]


def mlp_rules(a: Architecture, norm: str = "post_attention_layernorm.weight") -> list[Rule]:
    """Return the shard rules of a layer's dense feed-forward: its norm, fused gate/up and down
    projection.

    Args:
        norm: Hugging Face name of the norm.
    """
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
    """Return the shard rules of a layer's mixture of experts: its norm, router and experts.

    Expert tensor parallelism is not used, so each expert is complete on its rank.

    Args:
        block: Hugging Face name of the feed-forward.
        gate: Hugging Face name of an expert's gate projection.
        up: Hugging Face name of an expert's up projection.
        down: Hugging Face name of an expert's down projection.
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
    """Return a function that lists all rules of an architecture, with `feed_forward` in every
    layer.

    Args:
        feed_forward: Returns the rules of a layer's feed-forward.
    """

    def rules(a: Architecture) -> tuple[Rule, ...]:
        return (embedding_rule(a), *attention_rules(a), *feed_forward(a), *head_rules(a))

    return rules
