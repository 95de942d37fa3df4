"""Computes the linear layers of all experts of a rank in one product, by torch's `grouped_mm`.

`GroupedLinear` replaces Transformer Engine's linear layer, of which Megatron's grouped experts
(`TEGroupedMLP`) contain two, and has the same parameter names. Routing and activation are
Megatron's.

Invariants
- Results and gradients are the same as with a separate product for each expert.
- An expert without tokens has a zero gradient, also if no expert of the rank has tokens. Such
  gradients are zeroed here, because torch leaves them unwritten, or writes garbage on some GPUs
  (pytorch#172439).
- Each expert's weight is a separate parameter. The weights are stacked again for every product, so
  that no stacked copy takes memory between the forward and the backward pass.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_async.algorithms.device_batch import to_device

# Attributes of Megatron's token dispatcher. They are read only in the forward pass and, with
# `recompute: feed_forward`, when the backward pass repeats it.
_ROUTING: Final = ("probs", "routing_map", "reversed_local_input_permutation_mapping")


def forget_routing(layer: MoELayer, _inputs: object, _output: object) -> None:
    """Delete the routing that the token dispatcher of `layer` keeps after a forward pass, to free
    memory.

    This function is registered as a hook. It runs after the layer's forward pass, and again after
    its backward pass, in which `recompute: feed_forward` repeats the routing without a call of the
    layer.

    The routing probabilities keep their autograd graph alive, and the graph keeps the layer's input
    and its gradient. Without this hook, 48 layers of Qwen3-30B-A3B with 20,480 tokens keep 9.7 GB
    until the layer's next forward pass.
    """
    for name in _ROUTING:
        setattr(layer.token_dispatcher, name, None)


class GroupedLinear(torch.nn.Module):
    """Linear layers of E experts, applied to rows that are sorted by expert.

    Its parameters are `weight0` to `weight{E-1}`, each [out, in].
    """

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        **_: object,
    ) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        for expert in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
            )
            init_method(weight)
            # Each tensor rank has other experts. This mark makes Megatron count the gradients of
            # every tensor rank in the gradient norm, and not only those of the first.
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=0, stride=1)
            self.register_parameter(f"weight{expert}", weight)

    def forward(self, rows_PI: Tensor, rows_of_expert: list[int]) -> tuple[Tensor, None]:
        """Multiply each row by its expert's weight; return the result [P, out], and None in place
        of a bias, as Megatron's linear layers do.

        Args:
            rows_PI: Inputs, sorted by expert.
            rows_of_expert: Number of rows of each expert.
        """
        return _GroupedProduct.apply(rows_PI, rows_of_expert, *self.parameters()), None


class _GroupedProduct(torch.autograd.Function):
    """Autograd function that computes row @ weightᵀ for each row, with the weight of the row's
    expert."""

    @staticmethod
    def forward(ctx: Any, rows_PI: Tensor, counts: list[int], *weights_OI: Tensor) -> Tensor:
        ctx.counts = counts
        ends_E = to_device(np.cumsum(counts, dtype=np.int32), rows_PI.device)
        ctx.save_for_backward(rows_PI, ends_E, *weights_OI)
        if not len(rows_PI):
            return rows_PI.new_empty(0, len(weights_OI[0]))
        return F.grouped_mm(rows_PI, torch.stack(weights_OI).transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rows_PI, ends_E, *weights_OI = ctx.saved_tensors
        gradient_PO = gradients[0].contiguous()
        if not len(rows_PI):
            return torch.zeros_like(rows_PI), None, *map(torch.zeros_like, weights_OI)
        drows_PI = F.grouped_mm(gradient_PO, torch.stack(weights_OI), offs=ends_E)
        dweights_EOI = F.grouped_mm(gradient_PO.t(), rows_PI, offs=ends_E)
        dweights = [
            dweight if count else torch.zeros_like(dweight)
            for dweight, count in zip(dweights_EOI.unbind(), ctx.counts, strict=True)
        ]
        return drows_PI, None, *dweights
