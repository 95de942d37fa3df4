"""The collectives of a vocabulary-parallel head over one tensor-parallel group.

Invariants
- Every rank of the group calls the same collectives in the same order; whether a call happens
  depends only on sizes that all ranks share.
- Two small all-reduces forward (max; then sum, target logit and entropy term together), one
  all-reduce or reduce-scatter of dHidden backward, as Megatron's column-parallel linear has.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_async_kernels.head_types import HeadStats

# torch 2.13 renamed both; older versions know the first names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: dist.ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def reduce_stats(stats: HeadStats, group: dist.ProcessGroup | None) -> HeadStats:
    """Statistics over the whole vocabulary from those of each shard, [R] each."""
    if group_size(group) == 1 or stats.max_R.numel() == 0:
        return stats
    max_R = stats.max_R.clone()
    dist.all_reduce(max_R, op=dist.ReduceOp.MAX, group=group)
    # An empty shard has max -inf and sum 0; the clamp keeps 0 * inf out of its terms.
    shift_R = (stats.max_R - max_R).clamp(min=-1e30)
    scale_R = shift_R.exp()
    parts = [stats.sum_R * scale_R, stats.target_R]
    if stats.weighted_R is not None:
        parts.append((stats.weighted_R + stats.sum_R * shift_R) * scale_R)
    packed = torch.stack(parts)
    dist.all_reduce(packed, group=group)
    weighted_R = packed[2] if stats.weighted_R is not None else None
    return HeadStats(max_R, packed[0], packed[1], weighted_R)


def gather_sequence(hidden: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """[T/tp, D] of every rank, end to end in rank order: [T, D]."""
    size = group_size(group)
    if size == 1:
        return hidden
    gathered = hidden.new_empty((size * hidden.shape[0], hidden.shape[1]))
    _all_gather(gathered, hidden.contiguous(), group=group)
    return gathered


def reduce_hidden_grad(
    dhidden_TD: Tensor, group: dist.ProcessGroup | None, *, scatter: bool
) -> Tensor:
    """Sum of the shards' dHidden: whole, or this rank's [T/tp, D] slice of it."""
    size = group_size(group)
    if size == 1:
        return dhidden_TD
    if not scatter:
        dist.all_reduce(dhidden_TD, group=group)
        return dhidden_TD
    own = dhidden_TD.new_empty((dhidden_TD.shape[0] // size, dhidden_TD.shape[1]))
    _reduce_scatter(own, dhidden_TD, group=group)
    return own
