"""Checks, before anything starts, that a model can be divided over the trainer's ranks and an
engine's GPUs as configured.

Invariants
- The checks need neither torch nor Megatron nor a process group, so the command line can make them
  before it starts processes.
- Every impossible division is reported by a message that names the setting and its value.
"""

from megatron_async.config.model import ParallelConfig
from megatron_async.errors import UserError
from megatron_async.models.architecture import Architecture


def check_layout(architecture: Architecture, parallel: ParallelConfig) -> None:
    """Check that the model can be divided over the trainer's ranks as `parallel` says.

    Raises:
        UserError: If it cannot.
    """
    a, p = architecture, parallel
    if p.context != 1:
        raise UserError(
            f"parallel.context is {p.context}; only 1 is supported, since packed attention over "
            "context-parallel ranks is not implemented"
        )
    split = [("num_attention_heads", a.num_heads), ("num_key_value_heads", a.num_kv_heads)]
    if a.experts is None:
        split.append(("intermediate_size", a.ffn_size))
    for name, count in split:
        if count % p.tensor:
            raise UserError(
                f"parallel.tensor is {p.tensor}, which does not divide the model's {name} {count}"
            )
    if a.vocab_size < p.tensor * p.tensor:
        raise UserError(
            f"parallel.tensor is {p.tensor}; its square must not exceed the vocabulary size "
            f"{a.vocab_size}"
        )
    if a.num_layers % p.pipeline:
        raise UserError(
            f"parallel.pipeline is {p.pipeline}, which does not divide the model's "
            f"num_hidden_layers {a.num_layers}"
        )
    _check_experts(a, p)


def check_engine_layout(architecture: Architecture, tensor: int) -> None:
    """Check that SGLang can divide the model's heads over the `tensor` GPUs of an engine.

    Raises:
        UserError: If it cannot.
    """
    heads, kv_heads = architecture.num_heads, architecture.num_kv_heads
    if heads % tensor or (kv_heads % tensor and tensor % kv_heads):
        raise UserError(
            f"engines.tensor is {tensor}, which does not divide the model's num_attention_heads "
            f"{heads} and num_key_value_heads {kv_heads}"
        )


def _check_experts(a: Architecture, p: ParallelConfig) -> None:
    """Check that the experts of the model, if any, can be divided over the trainer's ranks.

    Raises:
        UserError: If they cannot.
    """
    if a.experts is None:
        if p.expert != 1:
            raise UserError(f"parallel.expert is {p.expert}, but {a.family} has no experts")
        return
    if a.experts.num % p.expert:
        raise UserError(
            f"parallel.expert is {p.expert}, which does not divide the model's "
            f"{a.experts.num} experts"
        )
    if (p.ranks // p.pipeline) % p.expert:
        raise UserError(
            f"parallel.expert is {p.expert}, which does not divide the {p.ranks // p.pipeline} "
            "ranks of a pipeline stage"
        )
    if p.tensor > 1 and not p.sequence:
        raise UserError(
            f"parallel.sequence is false; experts with parallel.tensor {p.tensor} require "
            "parallel.sequence: true"
        )
