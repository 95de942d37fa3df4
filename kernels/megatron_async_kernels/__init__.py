"""Token log-probs and losses: types, plain torch and Triton. The only implementation of a loss.

- loss_types: what a loss reads, its thresholds, what it returns; sums add over microbatches.
- loss_torch: the loss in plain torch, on any device and in float64. surrogates: the ratio, where it
  is clipped, and every surrogate with its derivative.
- is_loss: the same in Triton, in one pass over the tokens: triton_loss_tokens,
  triton_loss_sequences, triton_loss_terms, triton_loss_spec.
- token_logprob: log-probs and entropy straight from hidden states; no logits are kept. Also its
  collectives over tensor-parallel ranks.
- head_types: its head as plain data.
- reference, chunked: its torch reference, and the chunked torch version of CPU runs.
- triton_head, triton_forward, triton_backward, triton_tiles: its Triton version.
- cpu_matmul: float32 matrix products on AMD processors, for processes that train or generate there.
- packed: reductions over the sequences of a packed stream. backend: which version runs.
"""

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
