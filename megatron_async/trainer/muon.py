"""An optimizer that updates the layers' matrices by Muon and all other parameters by AdamW.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) updates a matrix by its momentum after
orthogonalizing it, which makes all singular values about 1. The update is scaled so that the root
mean square of its elements is about as large as in an Adam update (Liu et al. 2025, arXiv
2502.16982, section 2.2). Therefore one learning rate and one weight decay suit both optimizers.

Invariants
- Tensor parallelism changes nothing: the shards of a matrix are gathered, and the whole matrix is
  orthogonalized.
- A matrix is one weight of Megatron's model, which fuses query, key and value, and also gate and
  up. The weights of experts are separate matrices.
- All data-parallel ranks have the same state and compute the same updates; nothing is sharded over
  them.
- Every matrix has a momentum from the start, at first zero, in the precision of the optimizer's
  weights. The momentum is orthogonalized in the model's precision, which is accurate enough.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_async.checkpoint.manifest import MOMENTUM
from megatron_async.models.parameters import local_parameters
from megatron_async.models.shards import ShardLayout
from megatron_async.trainer.policy_model import PolicyModel

# Coefficients a, b, c by Jordan et al. of the polynomial a * s + b * s^3 + c * s^5. Applied five
# times to the singular values s, it brings them to about 0.7 to 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ROUNDS = 5


def matrices(model: PolicyModel) -> dict[Tensor, int | None]:
    """Return the weights of `model` that Muon updates, each with the dimension along which it is
    split over tensor ranks.

    Returns:
        A mapping from the tensor that the optimizer updates (its float32 copy of the weight, or the
        weight itself) to the dimension along which the weight is split over tensor ranks; None if
        it is not split.
    """
    found: dict[Tensor, int | None] = {}
    for placed in local_parameters([model], model.architecture):
        if placed.rule.is_matrix:
            main = getattr(placed.parameter, "main_param", placed.parameter)
            cut = placed.size > 1 and placed.rule.layout is not ShardLayout.REPLICATED
            found[main] = int(placed.rule.layout is ShardLayout.COLUMNS) if cut else None
    return found


class Muon(torch.optim.AdamW):
    """AdamW optimizer that updates the parameters in `matrices` by Muon, and all others by
    AdamW."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        matrices: Mapping[Tensor, int | None],
        momentum: float,
        precision: torch.dtype,
    ) -> None:
        super().__init__(groups)
        self._matrices = dict(matrices)
        self._momentum = momentum
        self._precision = precision
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in self._matrices:
                    self.state[parameter] = {MOMENTUM: torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient. Afterwards the matrices have no gradient: it
        is deleted so that AdamW does not update them too."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is not None and matrix in self._matrices:
                    self._update(matrix, group["lr"], group["weight_decay"])
                    matrix.grad = None
        return super().step(closure)

    def _update(self, matrix: Tensor, rate: float, weight_decay: float) -> None:
        """Update the momentum of one matrix, and then its values by Nesterov momentum and decoupled
        weight decay."""
        momentum = self.state[matrix][MOMENTUM].lerp_(matrix.grad, 1 - self._momentum)
        ahead = matrix.grad.lerp(momentum, self._momentum)  # Nesterov momentum
        direction, shape = orthogonalized(ahead.to(self._precision), self._matrices[matrix])
        matrix.mul_(1 - rate * weight_decay)
        matrix.add_(direction.to(matrix), alpha=-0.2 * rate * max(shape) ** 0.5)


def orthogonalized(shard: Tensor, dim: int | None) -> tuple[Tensor, torch.Size]:
    """Orthogonalize a matrix of which this rank has `shard`; return this rank's shard of the
    result, and the shape of the whole matrix.

    The result has singular values of about 1. If `dim` is None, `shard` is the whole matrix.
    Otherwise the matrix is split along `dim` over the tensor ranks, and all of them must make this
    call together.
    """
    if dim is None:
        return newton_schulz(shard), shard.shape
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    whole = newton_schulz(torch.cat(shards, dim))
    return whole.chunk(group.size(), dim)[group.rank()], whole.shape


def newton_schulz(matrix: Tensor) -> Tensor:
    """Return an approximation of U Vᵀ, where U S Vᵀ is the singular value decomposition of
    `matrix`.

    Singular values become 0.7 to 1.2 instead of 1, and those that are zero stay zero.
    """
    a, b, c = _COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T
