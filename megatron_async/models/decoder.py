"""Provides the shard rules that decoder families share, for embedding, attention, feed-forward and
head. A shard rule says from which Hugging Face tensors a Megatron parameter is made, and how
tensor-parallel ranks divide it.

A family combines these rules and passes the names that differ between families. Each parameter is
listed with its name in local Megatron layers and, if that differs, its name in Transformer Engine
layers, in which a norm is a part of the linear layer after it.
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
    """Return the shard rule of a parameter that every layer has: its names, its shapes, and how
    tensor-parallel ranks divide it.

    Args:
        layout: How tensor-parallel ranks divide the parameter.
        parameters: Its Megatron name in a local layer (one without Transformer Engine) and, if that
            differs, its name in a Transformer Engine layer.
        tensors: Shapes of its Hugging Face tensors, by their names inside a layer.
        groups: For a fused QKV parameter, the number of key/value heads; otherwise 0.
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
    """Return the shard rule of the weight of a norm inside a layer, which every tensor-parallel
    rank has completely.

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

    If the head is tied (it shares its weights with the embedding) and the model has several stages,
    the last stage has a copy of the embedding.
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
    """Return the shard rules of a layer's attention: its input norm, the fused projection of query,
    key and value (QKV), the norms of query and key heads, and the output projection.

    A rule for the bias of QKV and rules for the norms of query and key heads are included only if
    the architecture has them.
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
        expert: Whether each expert of a layer has such a feed-forward.
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
        norm: Hugging Face name of the norm before the feed-forward.
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

    Tensor parallelism does not divide experts, so a rank that has an expert has all of it.

    Args:
        block: Hugging Face name of the layer's feed-forward, inside which the experts are.
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
    """Return a function that returns all shard rules of an architecture: those of embedding,
    attention and head, and in every layer those that `feed_forward` returns.

    Args:
        feed_forward: Function that returns the rules of a layer's feed-forward.
    """

    def rules(a: Architecture) -> tuple[Rule, ...]:
        return (embedding_rule(a), *attention_rules(a), *feed_forward(a), *head_rules(a))

    return rules
