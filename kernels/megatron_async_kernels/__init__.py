"""Triton kernels for token log-probs and importance-ratio losses, with torch references."""

from megatron_async_kernels.backend import describe_backend, resolve_backend
from megatron_async_kernels.fused import FusedOutput, token_logprob_is_loss
from megatron_async_kernels.is_loss import is_loss
from megatron_async_kernels.loss_reference import reference_is_loss
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    NonFiniteInput,
    RejectionRule,
)
from megatron_async_kernels.reference import reference_token_logprob
from megatron_async_kernels.token_logprob import token_logprob

__all__ = [
    "Denominators",
    "FusedOutput",
    "LossConfig",
    "LossInputs",
    "LossMetrics",
    "LossOutput",
    "NonFiniteInput",
    "RejectionRule",
    "describe_backend",
    "is_loss",
    "reference_is_loss",
    "reference_token_logprob",
    "resolve_backend",
    "token_logprob",
    "token_logprob_is_loss",
]
