"""The mixture-of-experts router without Transformer Engine."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class TorchRouter(TopKRouter):
    """Megatron's top-k router with its gating product in plain torch.

    Megatron 0.16.1 computes it with a Transformer Engine kernel whose name does not exist when
    Transformer Engine is not installed.
    """

    def gating(self, input: Tensor) -> Tensor:
        """Router logits [T, 1, experts] in float32, as `moe_router_dtype` asks."""
        return F.linear(input.to(torch.float32), self.weight.to(torch.float32))
