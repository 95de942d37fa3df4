"""Provides log-probs of tokens and policy losses, each in plain torch and in Triton. No loss is
implemented outside this package.

- `loss_types` defines the inputs of a loss, its thresholds, and its result. Results of microbatches
  can be added.
- `loss_torch` computes the loss in plain torch, on any device and also in float64. `surrogates` has
  the formula of every surrogate loss and its derivative.
- `is_loss` computes the same loss in Triton, in one pass over the tokens, with the kernels in
  `triton_loss_tokens`, `triton_loss_sequences`, `triton_loss_terms` and `triton_loss_spec`.
- `token_logprob` computes log-probs and entropy directly from hidden states, without keeping
  logits. It also has the collectives over tensor-parallel ranks.
- `head_types` describes the inputs and results of the language-model head (output projection and
  softmax) as plain data.
- `reference` is the torch reference of `token_logprob`, and `chunked` the chunked torch version for
  CPU runs.
- `triton_head`, `triton_forward`, `triton_backward` and `triton_tiles` are the Triton version of
  `token_logprob`.
- `cpu_matmul` speeds up float32 matrix products on AMD processors, for processes that train or
  generate on CPUs.
- `packed` has reductions over the sequences of a packed stream. `backend` chooses the version that
  runs.
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
