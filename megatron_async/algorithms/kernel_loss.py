"""Which implementation computes the loss: the kernels' `is_loss` on CUDA, `policy_loss` elsewhere.

Invariants
- Both ways take and return the structs of `interface` and raise the same errors; they differ by
  rounding, and in that Triton does not look at `old_logprobs_T` where the ratio is not to it.
- The choice depends on the device of the log-probs, on the config and on an explicit `backend`.
- Kernels index memory with stride 1, so every stream is contiguous when it reaches them.
"""

from __future__ import annotations

from dataclasses import fields

import megatron_async_kernels as kernels
import torch
from megatron_async_kernels.backend import Backend
from megatron_async_kernels.loss_types import mirror
from megatron_async_kernels.triton_loss_spec import MAX_RULES

from megatron_async.algorithms.interface import (
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
)
from megatron_async.algorithms.losses import policy_loss
from megatron_async.errors import NonFiniteError

_TOO_MANY_RULES = f"more than {MAX_RULES} rejection rules"


def compute_loss(
    inputs: LossInputs,
    config: LossConfig,
    denominators: Denominators,
    *,
    backend: Backend | None = None,
) -> LossOutput:
    """The loss of one microbatch, [T] streams in and [T] gradients out as in `interface`.

    `backend` None chooses by `plain_reason`; a name takes the kernel package with that backend
    wherever the tensors are.

    Raises NonFiniteError naming the input that is not finite, ValueError when an input that
    `config` needs is missing, or when `backend` is `triton` and the config is beyond its limits.
    """
    if backend is None and plain_reason(inputs.logprobs_T.device, config) is not None:
        return policy_loss(inputs, config, denominators)
    try:
        output = kernels.is_loss(
            kernel_inputs(inputs),
            mirror(kernels.LossConfig, config),
            mirror(kernels.Denominators, denominators),
            backend=backend or "auto",
        )
    except kernels.NonFiniteInput as error:
        raise NonFiniteError(str(error)) from error
    metrics = output.metrics
    return LossOutput(
        loss_sum=output.loss_sum,
        dlogp_T=output.dlogp_T,
        dentropy_T=output.dentropy_T,
        metrics=LossMetrics(metrics.sums_M, metrics.lag_sums_LB, metrics.maxima_E),
    )


def plain_reason(device: torch.device, config: LossConfig) -> str | None:
    """Why `policy_loss` computes this loss for tensors on `device`; None where the kernel does."""
    if device.type != "cuda":
        return f"tensors on {device.type}"
    if len(config.rejection) > MAX_RULES:
        return _TOO_MANY_RULES
    return None


def describe_loss(*, cuda: bool, triton: str | None) -> str:
    """One line for `doctor`: what computes the loss on a machine with these, and the exceptions.

    `triton` is its version, None where it is not installed (the kernels' torch version runs then).
    """
    if not cuda:
        return "plain torch (no CUDA device)"
    kernel = "torch version (triton is not installed)" if triton is None else f"triton {triton}"
    return f"kernel, {kernel}; plain torch with {_TOO_MANY_RULES}"


def kernel_inputs(inputs: LossInputs) -> kernels.LossInputs:
    """The kernel package's struct of the same name; a contiguous stream is not copied."""
    streams = {field.name: getattr(inputs, field.name) for field in fields(kernels.LossInputs)}
    return kernels.LossInputs(
        **{
            name: None if stream is None else stream.contiguous()
            for name, stream in streams.items()
        }
    )
