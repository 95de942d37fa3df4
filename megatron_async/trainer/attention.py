"""Core attention over a packed stream: causal, within each sequence only, no score matrix kept.

Invariants
- A query attends only to keys of its own sequence, at or before it, and within the window where
  the layer has one.
- Grouped key/value heads are not expanded in memory, but where torch's kernel takes none.

On CUDA in half precision this is torch's variable-length flash attention in one call, as far as
the installed torch offers it; on the CPU, and in float32 on CUDA (flash attention has no float32),
it is one `scaled_dot_product_attention` per sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor


class PackedAttention(MegatronModule):
    """Takes [T, 1, heads, head_dim], gives [T, 1, heads * head_dim], as Megatron's SelfAttention

    expects of a core attention. `packed_seq_params` must hold the borders (`cu_seqlens_q`).
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        head_dim = config.kv_channels
        self.scale = 1.0 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
        self.window: int | None = None
        if is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        ):
            # Megatron counts the keys to the left of a query, without the query itself.
            self.window = config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each sequence. Raises ValueError without `packed_seq_params`."""
        if packed_seq_params is None:
            raise ValueError("PackedAttention needs packed_seq_params with the sequence borders")
        query_THD, key_TGD, value_TGD = (x.squeeze(1) for x in (query, key, value))
        out_THD = packed_attention(
            query_THD,
            key_TGD,
            value_TGD,
            packed_seq_params.cu_seqlens_q,
            int(packed_seq_params.max_seqlen_q),
            scale=self.scale,
            window=self.window,
        )
        return out_THD.reshape(out_THD.shape[0], 1, -1)


def packed_attention(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens_S1: Tensor,
    max_seqlen: int,
    *,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """softmax(scale · QKᵀ) V within each sequence, causal; [T, H, D] with G key/value heads.

    `window` is the number of keys that a query sees, itself included; None for all before it.
    """
    if query_THD.is_cuda and query_THD.dtype in (torch.float16, torch.bfloat16):
        from torch.nn.attention.varlen import varlen_attn

        call = varlen_call(frozenset(signature(varlen_attn).parameters), window is not None)
        if call is not None:
            return call(
                varlen_attn, query_THD, key_TGD, value_TGD, cu_seqlens_S1, max_seqlen, scale, window
            )
    return _per_sequence(query_THD, key_TGD, value_TGD, cu_seqlens_S1, scale, window)


VarlenCall = Callable[..., Tensor]


def varlen_call(parameters: frozenset[str], windowed: bool) -> VarlenCall | None:
    """Return how to call torch's `varlen_attn` with these parameters; None where it cannot do it.

    Its interface changes from release to release (torch 2.11 to 2.14: tests/data/varlen_attn.json),
    so each argument is passed only where it is known. Key/value heads are repeated where grouped
    ones are not taken; a scale that is not taken is multiplied into the query.
    """
    by_window = "window_size" in parameters
    if not by_window and (windowed or "is_causal" not in parameters):
        return None

    def call(
        attend: Callable[..., Tensor],
        query_THD: Tensor,
        key_TGD: Tensor,
        value_TGD: Tensor,
        cu_seqlens_S1: Tensor,
        max_seqlen: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        arguments: dict[str, Any] = {}
        if by_window:
            arguments["window_size"] = (-1 if window is None else window - 1, 0)
        else:
            arguments["is_causal"] = True
        if "scale" in parameters:
            arguments["scale"] = scale
        else:
            query_THD = query_THD * (scale * math.sqrt(query_THD.shape[-1]))
        group = query_THD.shape[1] // key_TGD.shape[1]
        if group > 1 and "enable_gqa" in parameters:
            arguments["enable_gqa"] = True
        elif group > 1:
            key_TGD, value_TGD = (x.repeat_interleave(group, 1) for x in (key_TGD, value_TGD))
        borders = (cu_seqlens_S1, cu_seqlens_S1, max_seqlen, max_seqlen)
        return attend(query_THD, key_TGD, value_TGD, *borders, **arguments)

    return call


def _per_sequence(
    query_THD: Tensor,
    key_TGD: Tensor,
    value_TGD: Tensor,
    cu_seqlens_S1: Tensor,
    scale: float,
    window: int | None,
) -> Tensor:
    lengths = torch.diff(cu_seqlens_S1).tolist()
    # Transposed before the split: a call in the loop is paid for by every sequence of every layer.
    split_1HLD = [
        x_THD.transpose(0, 1)[None].split(lengths, dim=2)
        for x_THD in (query_THD, key_TGD, value_TGD)
    ]
    grouped = query_THD.shape[1] != key_TGD.shape[1]
    parts = []
    for length, query_1HLD, key_1GLD, value_1GLD in zip(lengths, *split_1HLD, strict=True):
        mask = None
        if window is not None and window < length:
            position = torch.arange(length, device=query_THD.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < window)
        parts.append(
            F.scaled_dot_product_attention(
                query_1HLD,
                key_1GLD,
                value_1GLD,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2)[0].transpose(0, 1)
