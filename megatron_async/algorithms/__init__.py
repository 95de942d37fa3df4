"""Advantages, rollout correction, losses and off-policy metrics: pure functions of tensors."""

from megatron_async_kernels.loss_torch import policy_loss
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    attach_gradient,
)

from megatron_async.algorithms.algorithm import (
    Algorithm,
    build_algorithm,
    build_sft_algorithm,
)
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
