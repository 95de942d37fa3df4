"""RMSNorm that works under sequence parallelism without Transformer Engine or Apex."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x²) + eps) · w (Zhang and Sennrich, 2019, equation 4); (1 + w) when the

    config's `layernorm_zero_centered_gamma` is set. The weight carries `sequence_parallel`, by
    which Megatron sums its gradient over the tensor ranks that each saw a part of the tokens.
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
