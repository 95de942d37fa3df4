"""Layer modules that Megatron lacks, or has only for GPUs or with Transformer Engine."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_async.trainer.attention_kernels import Stream, packed_attention
from megatron_async.trainer.rotary import RotaryStream, rotate


class RMSNorm(torch.nn.Module):
    """Root mean square norm: x / sqrt(mean(x²) + eps) · w (Zhang and Sennrich, 2019, equation 4).

    The factor is (1 + w) if the config's `layernorm_zero_centered_gamma` is set. The weight has the
    attribute `sequence_parallel`, which tells Megatron to sum its gradient over the tensor ranks,
    each of which saw only some of the tokens.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: object
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalize the last dimension; the result has the dtype of `hidden`."""
        if self.zero_centered:
            # Gemma multiplies in float32 before it rounds to the storage type.
            weight = 1.0 + self.weight.float()
            return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).type_as(hidden)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal core attention over a packed stream, within each sequence only.

    It takes tensors of [T, 1, heads, head_dim] and returns [T, 1, heads * head_dim], as Megatron's
    SelfAttention expects. It also applies the rotary embedding to queries and keys, because
    Megatron would first round sines and cosines to the model's precision.
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
            # Megatron counts the keys before a query, without the query's own position.
            self.window = config.window_size[0] + 1

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: RotaryStream | None = None,
    ) -> Tensor:
        """Apply the rotary embedding to query and key, then attend within each sequence of the
        stream."""
        assert packed_seq_params is not None
        rotation = packed_seq_params.rotation(sliding_window=self.window is not None)
        out_THD = packed_attention(
            Stream(
                query_THD=rotate(query.squeeze(1), rotation),
                key_TGD=rotate(key.squeeze(1), rotation),
                value_TGD=value.squeeze(1),
                cu_seqlens_S1=packed_seq_params.cu_seqlens_q,
                max_seqlen=int(packed_seq_params.max_seqlen_q),
                scale=self.scale,
                window=self.window,
            )
        )
        return out_THD.reshape(out_THD.shape[0], 1, -1)


class TorchRouter(TopKRouter):
    """Megatron's top-k router, with the gating product in plain torch.

    Without Transformer Engine, Megatron 0.16.1 calls a kernel of it by a name that is then
    undefined.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return router logits [T, 1, experts] in float32, which `moe_router_dtype` requires."""
        return F.linear(input.to(torch.float32), self.weight.to(torch.float32))


class RowParallelLinearNorm(RowParallelLinear):
    """Row-parallel linear layer whose output is reduced and then normalized, before the residual is
    added."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        config = kwargs["config"]
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the normalized output, and the bias, which is None (Gemma 3 has none)."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias
