"""Core attention of Megatron's layers over a packed stream: causal, within each sequence only."""

from __future__ import annotations

import math
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_async.trainer.attention_kernels import packed_attention


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
