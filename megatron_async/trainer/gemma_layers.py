"""The two pieces of a Gemma 3 layer that Megatron's own modules lack."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_async.trainer.norm import RMSNorm


class RowParallelLinearNorm(RowParallelLinear):
    """A row-parallel linear layer whose reduced output is normalised before the residual."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        config = kwargs["config"]
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """The normalised output; there is no bias to add later (Gemma 3 has none)."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias


class LocalGlobalSelfAttention(SelfAttention):
    """Self-attention that takes both ropes stacked, [2, T, 1, 1, head_dim], global first, and

    uses its layer's own; the sliding window is the core attention's business.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        is_local = is_layer_window_attention(
            self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
        )
        kwargs["rotary_pos_emb"] = kwargs["rotary_pos_emb"][int(is_local)]
        return super().forward(hidden_states, attention_mask, **kwargs)
