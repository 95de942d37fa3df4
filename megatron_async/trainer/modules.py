"""Modules of a layer that Megatron lacks, or has for GPUs or with Transformer Engine alone.

Invariants
- Frequencies of rotary embeddings are computed in float32 in the order of operations that the
  engines and the published models use: at position 4,000 one unit in the last place of a frequency
  is already an angle of 1e-4.
- Their angles are gathered by each token's own position, so no loop over sequences is needed.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_async.models.architecture import Rope
from megatron_async.trainer.attention_kernels import Stream, packed_attention


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + eps) · w (Zhang and Sennrich, 2019, equation 4).

    It is (1 + w) when the config's `layernorm_zero_centered_gamma` is set. The weight carries
    `sequence_parallel`, by which Megatron sums its gradient over the tensor ranks that each saw a
    part of the tokens.
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
        """Normalises the last dimension; the result has the input's dtype."""
        if self.zero_centered:
            # Gemma multiplies in float32, before rounding to the storage type.
            weight = 1.0 + self.weight.float()
            return F.rms_norm(hidden.float(), weight.shape, weight, self.eps).type_as(hidden)
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class PackedAttention(MegatronModule):
    """Core attention over a packed stream: causal, within each sequence only.

    Takes [T, 1, heads, head_dim], gives [T, 1, heads * head_dim], as Megatron's SelfAttention
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
        out_THD = packed_attention(
            Stream(
                query_THD=query.squeeze(1),
                key_TGD=key.squeeze(1),
                value_TGD=value.squeeze(1),
                cu_seqlens_S1=packed_seq_params.cu_seqlens_q,
                max_seqlen=int(packed_seq_params.max_seqlen_q),
                scale=self.scale,
                window=self.window,
            )
        )
        return out_THD.reshape(out_THD.shape[0], 1, -1)


class TorchRouter(TopKRouter):
    """Megatron's top-k router with its gating product in plain torch.

    Megatron 0.16.1 computes it with a Transformer Engine kernel whose name does not exist when
    Transformer Engine is not installed.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Router logits [T, 1, experts] in float32, as `moe_router_dtype` asks."""
        return F.linear(input.to(torch.float32), self.weight.to(torch.float32))


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
    """Self-attention that takes both ropes and uses its layer's own.

    They are stacked, [2, T, 1, 1, head_dim], global first; the sliding window is the core
    attention's business.
    """

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        is_local = is_layer_window_attention(
            self.config.window_size, self.config.window_attn_skip_freq, self.layer_number
        )
        kwargs["rotary_pos_emb"] = kwargs["rotary_pos_emb"][int(is_local)]
        return super().forward(hidden_states, attention_mask, **kwargs)


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """θ^(−2i/d) for i < d/2 (Su et al., RoFormer, section 3.2.2), scaled by `rope.kind`.

    Returns float32 [head_dim / 2] on the CPU. The llama3 scaling is that of Llama 3.1's released
    code: wavelengths beyond the original context are divided by `factor`, with a linear blend in
    the number of rotations between `low_freq_factor` and `high_freq_factor`. YaRN's is a linear
    blend in the dimension between those that turn `beta_fast` and `beta_slow` times (Peng et al.,
    arXiv 2309.00071, section 3.2).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    frequencies = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        context = rope.original_max_positions
        long = wavelengths > context / rope.low_freq_factor
        short = wavelengths < context / rope.high_freq_factor
        span = rope.high_freq_factor - rope.low_freq_factor
        share = (context / wavelengths - rope.low_freq_factor) / span
        blended = (1 - share) * frequencies / rope.factor + share * frequencies
        scaled = torch.where(long, frequencies / rope.factor, blended)
        return torch.where(short, frequencies, scaled)
    if rope.kind == "yarn":
        kept = 1 - _yarn_ramp(rope, head_dim)
        return 1.0 / (rope.factor * rope.theta**exponent) * (1 - kept) + frequencies * kept
    return frequencies


def _yarn_ramp(rope: Rope, head_dim: int) -> Tensor:
    """Share of each frequency that is divided, [head_dim / 2]."""

    def dimension(rotations: float) -> float:
        """The dimension whose frequency turns so many times in the original context."""
        wavelength = rope.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension(rope.beta_fast)), 0)
    high = min(math.ceil(dimension(rope.beta_slow)), head_dim - 1)
    place = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    return ((place - low) / (high - low or 0.001)).clamp(0, 1)


def rotary_angles(inv_freq: Tensor, position_ids_T: Tensor) -> Tensor:
    """Angles as Megatron's attention takes them: [T, 1, 1, head_dim], float32."""
    half = torch.outer(position_ids_T.to(torch.float32), inv_freq)
    return torch.cat((half, half), dim=-1)[:, None, None, :]
