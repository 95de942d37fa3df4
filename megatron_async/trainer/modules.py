"""Modules of layers that Megatron does not have, or has only for GPUs or only with Transformer
Engine."""

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
    """Root mean square norm: x / sqrt(mean(x²) + eps) * w (Zhang and Sennrich, 2019, equation 4).

    If the config's `layernorm_zero_centered_gamma` is set, the factor is 1 + w instead of the
    weight w. Under sequence parallelism, each tensor rank normalizes only some of the tokens, so
    the weight's gradients must be summed over the tensor ranks. Its attribute `sequence_parallel`
    makes Megatron do that.
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
            # As in Gemma's published code, the product is computed in float32 and then rounded to
            # the type of `hidden`.
            weight = 1.0 + self.weight.float()
            return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).type_as(hidden)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Causal core attention over a packed stream, within each sequence only.

    It takes tensors of [T, 1, heads, head_dim] and returns [T, 1, heads * head_dim], as Megatron's
    SelfAttention expects. It also applies the rotary embedding to queries and keys, in float32.
    Megatron, which would otherwise apply it, rounds sines and cosines to the model's precision
    first.
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
            # Megatron's window size does not count the query's own position; `Stream.window` does.
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
    """Megatron's top-k router, with the product of its gate (router logits) computed by plain
    torch.

    Megatron 0.16.1 would use a kernel of Transformer Engine and fail with a NameError if that is
    not installed.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Return router logits [T, 1, experts] in float32, which `moe_router_dtype` requires."""
        return F.linear(input.to(torch.float32), self.weight.to(torch.float32))


class RowParallelLinearNorm(RowParallelLinear):
    """Row-parallel linear layer whose output is summed over the tensor ranks and then normalized.
    The residual is added to the normalized output, as in Gemma 3."""

    def __init__(self, input_size: int, output_size: int, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, **kwargs)
        config = kwargs["config"]
        self.post_layernorm = RMSNorm(config, output_size, eps=config.layernorm_epsilon)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the normalized output, and the bias, which is None (Gemma 3 has none)."""
        output, bias = super().forward(input_)
        return self.post_layernorm(output), bias
