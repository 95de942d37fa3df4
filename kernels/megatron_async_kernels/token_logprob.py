"""Provides `token_logprob`, which computes log-probs (and entropies) of given tokens directly from
hidden states.

It also has the collective operations for a head whose vocabulary is divided over a tensor-parallel
group.

Invariants
- No backend creates a tensor [T, V] in the forward or backward pass. The backward pass recomputes
  the logits from the saved hidden states, and their probabilities from each row's saved
  log-sum-exp.
- Tokens with mask 0 are left out of every product; their log-prob, entropy and gradient are 0, and
  their target id is never read.
- Results and statistics are float32 (float64 for float64 inputs).
- If `weight_grad_out` is given, the weight's gradient is added to it, as with Megatron's
  gradient-accumulation fusion, and autograd gets no gradient of the weight.
- Every rank of the group calls the same collectives in the same order; whether a collective is
  called depends only on sizes that are equal on all ranks.
- The forward pass has two small all-reduces: one of the maximum, and one of sum, target logit and
  entropy term together. The backward pass has one all-reduce or reduce-scatter of the gradient of
  the hidden states, as Megatron's column-parallel linear layer has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_async_kernels.backend import Backend, head_kernels, resolve_backend
from megatron_async_kernels.head_types import (
    DEFAULT_WORKSPACE_BYTES,
    LOWEST_SHIFT,
    HeadCotangents,
    HeadGrads,
    HeadProblem,
    HeadStats,
    accumulation_dtype,
)

# torch 2.13 renamed both functions; older versions have only the second name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    """Return the number of ranks of the group; 1 for None."""
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in the group; 0 for None."""
    return 0 if group is None else dist.get_rank(group)


def reduce_stats(stats: HeadStats, group: dist.ProcessGroup | None) -> HeadStats:
    """Combine the softmax statistics of all ranks' vocabulary shards into statistics over the whole
    vocabulary, each [R]."""
    if group_size(group) == 1 or stats.max_R.numel() == 0:
        return stats
    max_R = stats.max_R.clone()
    dist.all_reduce(max_R, op=dist.ReduceOp.MAX, group=group)
    shift_R = (stats.max_R - max_R).clamp(min=LOWEST_SHIFT)
    scale_R = shift_R.exp()
    parts = [stats.sum_R * scale_R, stats.target_R]
    if stats.weighted_R is not None:
        parts.append((stats.weighted_R + stats.sum_R * shift_R) * scale_R)
    packed = torch.stack(parts)
    dist.all_reduce(packed, group=group)
    weighted_R = packed[2] if stats.weighted_R is not None else None
    return HeadStats(max_R, packed[0], packed[1], weighted_R)


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Gather the hidden states [T/tp, D] of all ranks, concatenated in rank order: [T, D]."""
    size = group_size(group)
    if size == 1:
        return hidden
    gathered = hidden.new_empty((size * hidden.shape[0], hidden.shape[1]))
    _all_gather(gathered, hidden.contiguous(), group=group)
    return gathered


def reduce_hidden_grad(
    dhidden_TD: Tensor, group: dist.ProcessGroup | None, *, scatter: bool
) -> Tensor:
    """Sum the gradients of the hidden states over the ranks of the group; return the whole sum, or
    with `scatter` only this rank's [T/tp, D] slice."""
    size = group_size(group)
    if size == 1:
        return dhidden_TD
    if not scatter:
        dist.all_reduce(dhidden_TD, group=group)
        return dhidden_TD
    own = dhidden_TD.new_empty((dhidden_TD.shape[0] // size, dhidden_TD.shape[1]))
    _reduce_scatter(own, dhidden_TD, group=group)
    return own


@dataclass(frozen=True, eq=False)
class HeadCall:
    """Arguments of one `token_logprob` call that are not differentiable tensors."""

    targets_T: Tensor
    rows_R: Tensor | None
    temperature: float
    want_entropy: bool
    tp_group: dist.ProcessGroup | None
    sequence_parallel: bool
    weight_grad_out: Tensor | None
    vocab_size: int | None
    backend: str
    chunk_tokens: int | None
    workspace_bytes: int
    deterministic: bool

    def problem(self, hidden_TD: Tensor, weight_VD: Tensor) -> HeadProblem:
        """Return the inputs of the backend for this rank's vocabulary shard: without padding rows,
        and with target ids counted from the first row of the shard."""
        shard_rows = int(weight_VD.shape[0])
        first = group_rank(self.tp_group) * shard_rows
        valid = shard_rows
        if self.vocab_size is not None:
            valid = min(max(self.vocab_size - first, 0), shard_rows)
        targets_R = self.targets_T if self.rows_R is None else self.targets_T[self.rows_R]
        return HeadProblem(
            hidden_TD=hidden_TD,
            rows_R=self.rows_R,
            weight_VD=weight_VD[:valid],
            targets_R=targets_R.to(torch.int64) - first,
            inv_temperature=1.0 / self.temperature,
            workspace_bytes=self.workspace_bytes,
            chunk_tokens=self.chunk_tokens,
            deterministic=self.deterministic,
        )


def token_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    token_mask: Tensor | None = None,
    token_rows: Tensor | None = None,
    tp_group: dist.ProcessGroup | None = None,
    sequence_parallel: bool = False,
    weight_grad_out: Tensor | None = None,
    vocab_size: int | None = None,
    backend: Backend = "auto",
    chunk_tokens: int | None = None,
    workspace_bytes: int = DEFAULT_WORKSPACE_BYTES,
    deterministic: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute log softmax(hidden · weightᵀ / temperature) at the token ids `targets`, without
    creating the logits tensor.

    Args:
        hidden: [T, D], or this rank's [T/tp, D] with `sequence_parallel`; bf16, fp16, fp32, fp64.
        weight: [V/tp, D], this rank's contiguous shard of the vocabulary, dtype of `hidden`.
        targets: [T] integer ids over the whole vocabulary.
        temperature: divides the logits; > 0.
        return_entropy: also return each token's entropy in nats (differentiable).
        token_mask: [T]; tokens with 0 are skipped, and their results are 0. To find them, the host
            must wait for a GPU.
        token_rows: [R] int64, ascending; indices of the tokens that are not skipped, instead of a
            mask.
        tp_group: the ranks that share the vocabulary; shards are equal in size and in rank order.
        sequence_parallel: whether each rank has only its slice of `hidden`, which is gathered over
            `tp_group` in the forward pass and whose gradient is reduce-scattered in the backward
            pass.
        weight_grad_out: [V/tp, D] float32 (float64 for float64 inputs), to which the gradient of
            the weight is added; None to give the gradient to autograd.
        vocab_size: number of vocabulary rows without padding; padding rows after them get neither
            probability nor gradient. None if there is no padding.
        backend: "auto" is triton on CUDA and chunked torch elsewhere.
        chunk_tokens: upper bound on the tokens of a block in the chunked backend; None to choose it
            from `workspace_bytes`. The Triton backend ignores it.
        workspace_bytes: upper bound on the memory of temporaries.
        deterministic: whether results must repeat bit for bit, so that no atomic additions are used
            (the chunked backend never uses any).

    Returns:
        Log-probs [T], or (log-probs [T], entropy [T]); float32, float64 for float64 inputs.

    Raises:
        ValueError: Shapes, dtypes or arguments contradict each other.
    """
    name = resolve_backend(backend, hidden.device, hidden.dtype)
    total = _check_arguments(
        hidden, weight, targets, token_mask, temperature, tp_group, sequence_parallel
    )
    _check_weight_grad_out(weight, weight_grad_out)
    vocab_rows = int(weight.shape[0]) * group_size(tp_group)
    if vocab_size is not None and not 0 < vocab_size <= vocab_rows:
        raise ValueError(f"vocab_size must be within 1..{vocab_rows}, got {vocab_size}")
    if token_mask is not None and token_rows is not None:
        raise ValueError("token_mask and token_rows exclude each other. Pass only one of them")
    rows_R = token_rows if token_mask is None else token_mask.reshape(total).nonzero()[:, 0]
    if rows_R is not None and rows_R.numel() == total:
        rows_R = None
    _check_targets(targets if rows_R is None else targets[rows_R], vocab_size or vocab_rows)
    call = HeadCall(
        targets_T=targets,
        rows_R=rows_R,
        temperature=float(temperature),
        want_entropy=return_entropy,
        tp_group=tp_group,
        sequence_parallel=sequence_parallel and group_size(tp_group) > 1,
        weight_grad_out=weight_grad_out,
        vocab_size=vocab_size,
        backend=name,
        chunk_tokens=chunk_tokens,
        workspace_bytes=workspace_bytes,
        deterministic=deterministic,
    )
    logprobs_T, entropy_T = _TokenLogprob.apply(hidden, weight, call)
    return (logprobs_T, entropy_T) if return_entropy else logprobs_T


class _TokenLogprob(torch.autograd.Function):
    """Autograd function of `token_logprob`, which calls the collectives and the backend's forward
    and backward functions."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, call: HeadCall
    ) -> tuple[Tensor, Tensor]:
        gathered = gather_sequence(hidden, call.tp_group) if call.sequence_parallel else hidden
        problem = call.problem(gathered, weight)
        stats = head_kernels(call.backend).stats(problem, want_entropy=call.want_entropy)
        stats = reduce_stats(stats, call.tp_group)
        entropy_R = stats.entropy()
        ctx.call = call
        ctx.weight_parameter = weight
        ctx.save_for_backward(hidden, weight, stats.log_sum_exp(), entropy_R)
        logprobs_T = scatter_rows(stats.logprob(), call)
        if entropy_R is None:
            return logprobs_T, logprobs_T.new_zeros(0)
        return logprobs_T, scatter_rows(entropy_R, call)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, grad_logprobs_T: Tensor, grad_entropy_T: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        call: HeadCall = ctx.call
        hidden, weight, log_sum_exp_R, entropy_R = ctx.saved_tensors
        cotangents = HeadCotangents(
            log_sum_exp_R=log_sum_exp_R,
            grad_logprob_R=_take_rows(grad_logprobs_T, call),
            grad_entropy_R=_take_rows(grad_entropy_T, call) if call.want_entropy else None,
            entropy_R=entropy_R,
        )
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        gathered = gather_sequence(hidden, call.tp_group) if call.sequence_parallel else hidden
        problem = call.problem(gathered, weight)
        valid = int(problem.weight_VD.shape[0])
        dhidden_TD = torch.zeros_like(gathered) if wants_hidden else None
        dweight, added_to = None, call.weight_grad_out if wants_weight else None
        if wants_weight and added_to is None:
            dweight = added_to = torch.zeros_like(weight)
        grads = HeadGrads(
            dhidden_TD=dhidden_TD,
            dweight_VD=None if added_to is None else added_to[:valid],
        )
        head_kernels(call.backend).grads(problem, cotangents, grads)
        if dhidden_TD is not None:
            dhidden_TD = reduce_hidden_grad(
                dhidden_TD, call.tp_group, scatter=call.sequence_parallel
            )
        if wants_weight and dweight is None:
            dweight = mark_weight_grad_added(ctx.weight_parameter)
        return dhidden_TD, dweight, None


def mark_weight_grad_added(weight: Tensor) -> Tensor | None:
    """Return the value that autograd gets as the gradient of a weight whose gradient was added to
    Megatron's main gradient already.

    For a weight with the attribute `grad_added_to_main_grad`, set it to True, so that Megatron's
    data-parallel hook does not add the gradient again, and return a zero that is expanded to the
    weight's shape, because with overlapped reduction the hook requires that a gradient exists. For
    other weights, return None.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    return weight.new_zeros(()).expand(weight.shape)


def scatter_rows(values_R: Tensor, call: HeadCall) -> Tensor:
    """Expand the values of the tokens that take part, [R], to all tokens, [T], with 0 for tokens
    that are skipped."""
    if call.rows_R is None:
        return values_R
    out_T = values_R.new_zeros(call.targets_T.shape[0])
    out_T[call.rows_R] = values_R
    return out_T


def _take_rows(values_T: Tensor, call: HeadCall) -> Tensor:
    """Select the values of the tokens that take part from the values of all tokens [T]; return them
    as a contiguous array [R]."""
    taken = values_T if call.rows_R is None else values_T[call.rows_R]
    return taken.contiguous()


def _check_arguments(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    token_mask: Tensor | None,
    temperature: float,
    tp_group: dist.ProcessGroup | None,
    sequence_parallel: bool,
) -> int:
    """Return T, the number of tokens over all ranks; raise ValueError if shapes, dtypes or the
    temperature are invalid."""
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden [T, D] and weight [V, D] must share D, got {tuple(hidden.shape)} and "
            f"{tuple(weight.shape)}"
        )
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"hidden and weight must share a float dtype, got {hidden.dtype} and {weight.dtype}"
        )
    total = int(hidden.shape[0]) * (group_size(tp_group) if sequence_parallel else 1)
    if tuple(targets.shape) != (total,) or targets.is_floating_point():
        raise ValueError(
            f"targets must be integers of shape [{total}], got "
            f"{targets.dtype} {tuple(targets.shape)}"
        )
    if token_mask is not None and tuple(token_mask.shape) != (total,):
        raise ValueError(f"token_mask must have shape [{total}], got {tuple(token_mask.shape)}")
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    return total


def _check_weight_grad_out(weight: Tensor, weight_grad_out: Tensor | None) -> None:
    if weight_grad_out is None:
        return
    expected = accumulation_dtype(weight.dtype)
    if weight_grad_out.shape != weight.shape or weight_grad_out.dtype != expected:
        raise ValueError(
            f"weight_grad_out must be {expected} of shape {tuple(weight.shape)}, got "
            f"{weight_grad_out.dtype} {tuple(weight_grad_out.shape)}"
        )


def _check_targets(targets_R: Tensor, limit: int) -> None:
    """Raise ValueError if a target id is outside the vocabulary, 0 to `limit` - 1. On a GPU, a
    device assertion fails instead, so that the host need not wait."""
    if targets_R.numel() == 0:
        return
    if targets_R.device.type == "cpu":
        low, high = int(targets_R.min()), int(targets_R.max())
        if low < 0 or high >= limit:
            raise ValueError(f"targets must lie in 0..{limit - 1}, found {low}..{high}")
    else:
        inside = ((targets_R >= 0) & (targets_R < limit)).all()
        torch._assert_async(inside, f"targets must lie in 0..{limit - 1}")
