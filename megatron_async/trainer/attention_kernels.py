"""Causal attention over a packed token stream, by torch only.

Invariants
- A query attends only to keys of its own sequence, at or before its position, and within the
  sliding window if there is one.
- A key/value head that several query heads share is not copied, unless torch's attention function
  does not support shared heads.

On a GPU in half precision, this is torch's variable-length flash attention. On the CPU, and in
float32 on a GPU (flash attention has no float32), each sequence is one call of
`scaled_dot_product_attention`.
"""

from collections.abc import Callable
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Stream(NamedTuple):
    """Inputs of attention over a stream of tokens, in which sequences follow each other without
    padding: queries [T, H, D], and keys and values of G heads [T, G, D].

    Attributes:
        cu_seqlens_S1: Position of each sequence's first token, and T at the end.
        max_seqlen: Length of the longest sequence.
        scale: Factor of the attention scores.
        window: Number of keys that a query sees, its own position included; None for all earlier
            keys.
    """

    query_THD: Tensor
    key_TGD: Tensor
    value_TGD: Tensor
    cu_seqlens_S1: Tensor
    max_seqlen: int
    scale: float
    window: int | None = None

    @property
    def group(self) -> int:
        """Number of query heads that share one key/value head."""
        return self.query_THD.shape[1] // self.key_TGD.shape[1]


def packed_attention(stream: Stream) -> Tensor:
    """Return softmax(scale * Q Kᵀ) V of shape [T, H, D] for the queries Q, keys K and values V of
    `stream`. Each query attends only to its own sequence, up to its own position and within the
    window of `stream`, if it has one."""
    query_THD = stream.query_THD
    if not query_THD.is_cuda or query_THD.dtype not in (torch.float16, torch.bfloat16):
        return _per_sequence(stream)
    from torch.nn.attention.varlen import varlen_attn

    return varlen_call(varlen_attn, stream)


@cache
def _takes_grouped_heads(attend: Callable[..., Any]) -> bool:
    return "enable_gqa" in signature(attend).parameters


def varlen_call(attend: Callable[..., Any], stream: Stream) -> Tensor:
    """Call torch's `varlen_attn` (passed as `attend`) on `stream`.

    torch 2.11's version does not support shared key/value heads, so they are repeated for it.
    """
    query, key, value, borders, longest, scale, window = stream
    arguments: dict[str, Any] = {"window_size": (-1 if window is None else window - 1, 0)}
    if stream.group > 1 and _takes_grouped_heads(attend):
        arguments["enable_gqa"] = True
    elif stream.group > 1:
        key, value = (x.repeat_interleave(stream.group, 1) for x in (key, value))
    out_THD: Tensor = attend(
        query, key, value, borders, borders, longest, longest, scale=scale, **arguments
    )
    return out_THD


def _per_sequence(stream: Stream) -> Tensor:
    lengths = torch.diff(stream.cu_seqlens_S1).tolist()
    window, grouped = stream.window, stream.group > 1
    wide: tuple[Tensor, ...] = (stream.query_THD, stream.key_TGD, stream.value_TGD)
    if not stream.query_THD.is_cuda and stream.query_THD.dtype.itemsize == 2:
        # On a CPU, the backward pass of torch's attention is five times slower in half precision
        # than in float32.
        wide = tuple(x_THD.float() for x_THD in wide)
    # The tensors are transposed once here, before they are split, and not for each sequence in the
    # loop below.
    split_1HLD = [x_THD.transpose(0, 1)[None].split(lengths, dim=2) for x_THD in wide]
    parts = []
    for length, query_1HLD, key_1GLD, value_1GLD in zip(lengths, *split_1HLD, strict=True):
        mask = None
        if window is not None and window < length:
            position = torch.arange(length, device=query_1HLD.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < window)
        parts.append(
            F.scaled_dot_product_attention(
                query_1HLD,
                key_1GLD,
                value_1GLD,
                attn_mask=mask,
                is_causal=mask is None,
                scale=stream.scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2)[0].transpose(0, 1).to(stream.query_THD.dtype)
