"""`token_logprob_is_loss`: from hidden states to the loss and its gradients in one step.

The head's forward leaves partial softmax statistics; the loss kernel's first pass finishes the
log-prob of a token, and in the same breath computes ratio, loss term and gradient coefficient, so
that no log-prob array is read back. Backward goes straight to dHidden and dWeight with that
coefficient folded into dLoss/dlogits. With tensor parallelism the statistics are reduced first
and the same kernel runs on the reduced ones.

Invariants
- The result equals `token_logprob` followed by `is_loss`; other backends than triton run just that.
- Masked tokens are compacted away before the product and cost nothing in the loss either.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_async_kernels.backend import Backend, resolve_backend
from megatron_async_kernels.head_types import DEFAULT_WORKSPACE_BYTES, HeadCotangents
from megatron_async_kernels.is_loss import FinishedHead, is_loss, launch_loss
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    mirror,
    raise_non_finite,
    require_inputs,
)
from megatron_async_kernels.token_logprob import (
    HeadCall,
    head_backward,
    mark_weight_grad_added,
    prepare_call,
    scatter_rows,
    token_logprob,
)
from megatron_async_kernels.triton_loss_spec import LossSpec, loss_spec
from megatron_async_kernels.vocab_parallel import gather_sequence, group_size, reduce_stats


@dataclass(frozen=True, eq=False)
class FusedOutput:
    """`loss` [] carries the gradient to hidden, weight and bias; everything else is detached."""

    loss: Tensor
    logprobs_T: Tensor
    entropy_T: Tensor | None
    metrics: LossMetrics


def token_logprob_is_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    inputs: LossInputs | Any,
    config: LossConfig | Any,
    denominators: Denominators | Any,
    *,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    with_entropy: bool = False,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    weight_grad_out: Tensor | None = None,
    vocab_size: int | None = None,
    backend: Backend = "auto",
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    deterministic: bool = False,
    check: bool = True,
) -> FusedOutput:
    """The loss of one microbatch of whole sequences from the head's inputs.

    `inputs.logprobs_T` and `inputs.entropy_T` are ignored (they may be None): they are computed
    here, for the tokens with mask 1. `with_entropy` (implied by an entropy bonus) also reports
    the entropy. The other arguments are those of `token_logprob` and `is_loss`.

    Raises
        ValueError, NonFiniteInput: as `token_logprob` and `is_loss`.
    """
    settings, counts = mirror(LossConfig, config), mirror(Denominators, denominators)
    streams = mirror(LossInputs, inputs)
    wants_entropy = with_entropy or settings.entropy_coef != 0.0
    name = resolve_backend(backend, hidden.device, hidden.dtype)
    head_options: dict[str, Any] = {
        "temperature": temperature,
        "bias": bias,
        "return_entropy": wants_entropy,
        "token_mask": streams.mask_T,
        "tp_group": tp_group,
        "sequence_parallel": sequence_parallel,
        "weight_grad_out": weight_grad_out,
        "vocab_size": vocab_size,
        "backend": name,
        "workspace_bytes": workspace_bytes,
        "deterministic": deterministic,
    }
    if name != "triton":
        return _two_steps(hidden, weight, targets, streams, settings, counts, head_options, check)
    call = prepare_call(hidden, weight, targets, chunk_tokens=None, **head_options)
    rows_R = call.rows_R
    if rows_R is None:
        rows_R = torch.arange(targets.shape[0], device=targets.device)
    placeholder_T = streams.rollout_logprobs_T
    streams = replace(
        streams,
        logprobs_T=placeholder_T,
        entropy_T=placeholder_T if wants_entropy else None,
        cu_seqlens_S1=_compacted(streams.cu_seqlens_S1, streams.mask_T),
    )
    require_inputs(streams, settings)
    step = _Step(call, streams, settings, counts, rows_R)
    loss, logprobs_R, entropy_R = _FusedLoss.apply(hidden, weight, bias, step)
    output, nonfinite = step.finished[0]
    logprobs_T = scatter_rows(logprobs_R, call)
    entropy_T = scatter_rows(entropy_R, call) if wants_entropy else None
    if check and float(nonfinite) > 0:
        raise_non_finite(replace(streams, logprobs_T=logprobs_T, entropy_T=entropy_T))
    return FusedOutput(loss, logprobs_T, entropy_T, output.metrics)


@dataclass(frozen=True, eq=False)
class _Step:
    """One fused call's plain data; `finished` receives the forward's (output, nonfinite)."""

    call: HeadCall
    streams: LossInputs
    config: LossConfig
    denominators: Denominators
    rows_R: Tensor
    finished: list[tuple[LossOutput, Tensor]] = field(default_factory=list)

    def spec(self) -> LossSpec:
        return loss_spec(self.streams, self.config, combine=True, gather=True)


class _FusedLoss(torch.autograd.Function):
    """Head statistics, reduction, finishing loss kernel; backward with folded coefficients."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, step: _Step
    ) -> tuple[Tensor, Tensor, Tensor]:
        from megatron_async_kernels.triton_head import PartialStats, TritonKernels, partial_stats

        call = step.call
        gathered = gather_sequence(hidden, call.tp_group) if call.sequence_parallel else hidden
        problem = call.problem(gathered, weight, bias)
        if group_size(call.tp_group) == 1:
            partial = partial_stats(problem, want_entropy=call.want_entropy)
        else:
            local = TritonKernels().stats(problem, want_entropy=call.want_entropy)
            whole = reduce_stats(local, call.tp_group)
            weighted_R = whole.max_R if whole.weighted_R is None else whole.weighted_R
            partial = PartialStats(
                whole.max_R[None], whole.sum_R[None], weighted_R[None], whole.target_R.contiguous()
            )
        logprobs_R = torch.empty_like(partial.target_R)
        log_sum_exp_R = torch.empty_like(logprobs_R)
        entropy_R = torch.empty_like(logprobs_R) if call.want_entropy else None
        head = FinishedHead(partial, step.rows_R, logprobs_R, log_sum_exp_R, entropy_R)
        result = launch_loss(step.streams, step.spec(), step.denominators, head)
        step.finished.append((result.output, result.nonfinite))
        ctx.call, ctx.weight_parameter = call, weight
        ctx.save_for_backward(
            hidden,
            weight,
            bias,
            log_sum_exp_R,
            entropy_R,
            result.output.dlogp_T,
            result.output.dentropy_T,
        )
        reported_R = logprobs_R.new_zeros(0) if entropy_R is None else entropy_R
        ctx.mark_non_differentiable(logprobs_R, reported_R)
        return result.output.loss_sum.clone(), logprobs_R, reported_R

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_loss: Tensor, _grad_logprobs: Tensor, _grad_entropy: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        call: HeadCall = ctx.call
        hidden, weight, bias, log_sum_exp_R, entropy_R, dlogp_R, dentropy_R = ctx.saved_tensors
        cotangents = HeadCotangents(
            log_sum_exp_R=log_sum_exp_R,
            grad_logprob_R=dlogp_R * grad_loss,
            grad_entropy_R=None if dentropy_R is None else dentropy_R * grad_loss,
            entropy_R=entropy_R,
        )
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dhidden, dweight, dbias = head_backward(
            call,
            hidden,
            weight,
            bias,
            cotangents,
            wants=(wants_hidden, wants_weight, wants_bias and bias is not None),
        )
        if wants_weight and call.weight_grad_out is not None:
            dweight = mark_weight_grad_added(ctx.weight_parameter)
        return dhidden, dweight, dbias, None


class _Attach(torch.autograd.Function):
    """A scalar with the loss's value whose backward hands the closed-form gradients on."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, logprobs_T: Tensor, entropy_T: Tensor | None, output: LossOutput
    ) -> Tensor:
        ctx.output = output
        return output.loss_sum.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_loss: Tensor) -> tuple[Tensor, Tensor | None, None]:
        output: LossOutput = ctx.output
        dentropy_T = output.dentropy_T
        return (
            grad_loss * output.dlogp_T,
            None if dentropy_T is None else grad_loss * dentropy_T,
            None,
        )


def _two_steps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    streams: LossInputs,
    config: LossConfig,
    denominators: Denominators,
    head_options: dict[str, Any],
    check: bool,
) -> FusedOutput:
    """`token_logprob`, then `is_loss`: what the fused kernels must equal."""
    result = token_logprob(hidden, weight, targets, **head_options)
    logprobs_T, entropy_T = result if isinstance(result, tuple) else (result, None)
    detached = replace(
        streams,
        logprobs_T=logprobs_T.detach(),
        entropy_T=None if entropy_T is None else entropy_T.detach(),
    )
    output = is_loss(detached, config, denominators, check=check)
    loss = _Attach.apply(logprobs_T, entropy_T, output)
    return FusedOutput(loss, detached.logprobs_T, detached.entropy_T, output.metrics)


def _compacted(cu_seqlens_S1: Tensor, mask_T: Tensor) -> Tensor:
    """Sequence bounds counted in trained tokens, [S + 1]."""
    trained_T1 = torch.zeros(mask_T.shape[0] + 1, dtype=torch.int64, device=mask_T.device)
    torch.cumsum(mask_T != 0, dim=0, out=trained_T1[1:])
    return trained_T1[cu_seqlens_S1.to(torch.int64)]
