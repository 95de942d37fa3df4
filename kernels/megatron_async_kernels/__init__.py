"""Triton kernels for token log-probs and importance-ratio losses, with torch references."""

from megatron_async_kernels.backend import describe_backend, resolve_backend
from megatron_async_kernels.is_loss import is_loss
from megatron_async_kernels.loss_torch import OwnLoss, policy_loss
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    NonFiniteError,
    RejectionRule,
)
from megatron_async_kernels.reference import reference_token_logprob
from megatron_async_kernels.token_logprob import token_logprob

__all__ = [
    "Denominators",
    "LossConfig",
    "LossInputs",
    "LossMetrics",
    "LossOutput",
    "NonFiniteError",
    "OwnLoss",
    "RejectionRule",
    "describe_backend",
    "is_loss",
    "policy_loss",
    "reference_token_logprob",
    "resolve_backend",
    "token_logprob",
]
