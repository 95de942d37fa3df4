"""Advantages, rollout correction, metrics and the registry of losses: pure functions of tensors.

- algorithm: the seam with the trainer. A batch is never modified; each step returns a new one.
- device_batch: a batch as tensors on the device, where it goes once.
- advantages: from rewards to advantages, with shaping and filtering before them.
- correction: importance weights and rejection masks. Weights carry no gradient. Their
  metrics are under `rollout_corr/`.
- loss_settings: from a run's settings to the thresholds of a loss.
- own_loss: a user's loss by import path (`algorithm.loss`, examples/own_loss), tried before a run.
- metrics: from additive sums to what a run reports; a mean over nothing is left out.
- reduce: sum, mean, extremes and deviation of a tensor, defined for no element at all.

The losses themselves, and the clipped ratio, are in `megatron_async_kernels`.
"""

from megatron_async_kernels.loss_torch import policy_loss
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    attach_gradient,
)

from megatron_async.algorithms.algorithm import Algorithm, build_algorithm, build_sft_algorithm
from megatron_async.algorithms.correction import compute_rollout_correction
from megatron_async.algorithms.loss_settings import loss_config
from megatron_async.algorithms.metrics import finalize, health_warnings

__all__ = [
    "Algorithm",
    "Denominators",
    "LossConfig",
    "LossInputs",
    "LossMetrics",
    "LossOutput",
    "attach_gradient",
    "build_algorithm",
    "build_sft_algorithm",
    "compute_rollout_correction",
    "finalize",
    "health_warnings",
    "loss_config",
    "policy_loss",
]
