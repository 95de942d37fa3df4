"""Groups a batch's sequences into microbatches for every data-parallel rank, by pure, deterministic
functions.

Invariants
- Every sequence is in exactly one microbatch of one data-parallel rank, and is never split.
- All data-parallel ranks get the same number of microbatches, at least one, because every rank must
  take part in the collectives of each microbatch. A rank with less work gets smaller or empty
  microbatches (for an empty one, the model runs on two dummy tokens with a zero gradient).
- A microbatch has more tokens than the token budget only if it is a single sequence that is longer
  than the budget.
- There is no padding. The plan depends only on lengths, budget and number of ranks, so every rank
  computes the same plan from the same batch without communication.
"""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CostArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]


def sequence_cost(lengths_S: npt.NDArray[np.integer], hidden_size: int) -> CostArray:
    """Return the cost of the forward pass of each sequence, [S], in units of one token's matrix
    products with weights.

    For a sequence of L tokens and a dense layer of width D = `hidden_size`, these products (query,
    key, value and output projections, and a feed-forward part of width 4 * D) take about 24 * D^2
    floating point operations per token. Causal attention takes 2 * L * D more per token. The sum
    over the L tokens, divided by 24 * D^2, is L * (1 + L / (12 * D)). The constants follow the
    usual count (arXiv 2104.04473, appendix); only the balance of work depends on them.
    """
    lengths = lengths_S.astype(np.float64)
    return lengths * (1.0 + lengths / (12.0 * hidden_size))


def plan_microbatches(
    lengths_S: npt.NDArray[np.integer], *, data_parallel: int, token_budget: int, hidden_size: int
) -> list[list[IndexArray]]:
    """Distribute sequences over data-parallel ranks so that their costs are balanced, and then over
    the microbatches of each rank so that they keep the token budget.

    Sequences are given to ranks in the order of falling cost, each to the rank with the least cost
    so far. The cost of the busiest rank is then at most 4/3 of the optimum (longest processing time
    rule, Graham 1969). Next, the sequences of each rank are packed by first-fit decreasing: in the
    order of falling cost, each into the first microbatch with enough tokens free. The rank that
    needs the most microbatches determines their number for all ranks. Finally, the sequences of
    each rank are distributed over this number of microbatches, with nearly equal costs if the token
    budget permits that.

    Args:
        lengths_S: Length of each sequence in tokens.
        data_parallel: Number of data-parallel ranks.
        token_budget: Largest number of tokens of a microbatch.
        hidden_size: Width of the model, for the cost.

    Returns:
        For each data-parallel rank, the batch indices of the sequences of each microbatch,
        ascending.
    """
    lengths = lengths_S.astype(np.int64)
    cost_S = sequence_cost(lengths, hidden_size)
    shards = balance(cost_S, data_parallel)
    bins = [_first_fit(lengths, cost_S, shard, token_budget) for shard in shards]
    count = max(1, *(len(rank_bins) for rank_bins in bins))
    return [
        _spread(lengths, cost_S, shard, rank_bins, count, token_budget)
        for shard, rank_bins in zip(shards, bins, strict=True)
    ]


def balance(cost_S: CostArray, shards: int) -> list[IndexArray]:
    """Split the items 0 to len(cost_S) - 1 greedily into `shards` shards with nearly equal total
    costs.

    Returns:
        The indices of each shard, ascending.
    """
    heap = [(0.0, shard) for shard in range(shards)]
    members: list[list[int]] = [[] for _ in range(shards)]
    for index in _descending(cost_S, np.arange(len(cost_S))):
        load, shard = heapq.heappop(heap)
        members[shard].append(index)
        heapq.heappush(heap, (load + float(cost_S[index]), shard))
    return [np.array(sorted(indices), dtype=np.int64) for indices in members]


def _descending(cost_S: CostArray, indices: npt.NDArray[np.integer]) -> list[int]:
    """Sort `indices` by falling cost. Indices of equal cost are sorted by rising index, so that
    plans are reproducible."""
    return sorted((int(index) for index in indices), key=lambda index: (-cost_S[index], index))


def _first_fit(
    lengths: npt.NDArray[np.integer], cost_S: CostArray, shard: IndexArray, budget: int
) -> list[list[int]]:
    """Pack sequences by first-fit decreasing into bins (microbatches) of at most `budget` tokens.

    A sequence longer than `budget` gets its own bin.

    Args:
        lengths: Length of each sequence of the batch.
        cost_S: Cost of each sequence of the batch.
        shard: Indices of the sequences to pack, which are those of one data-parallel rank.
        budget: Largest number of tokens of a bin.
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for index in _descending(cost_S, shard):
        length = int(lengths[index])
        fit = next((index for index, tokens in enumerate(free) if tokens >= length), None)
        if fit is None:
            bins.append([index])
            free.append(budget - length)
        else:
            bins[fit].append(index)
            free[fit] -= length
    return bins


def _spread(
    lengths: npt.NDArray[np.integer],
    cost_S: CostArray,
    shard: IndexArray,
    packed: Sequence[Sequence[int]],
    count: int,
    budget: int,
) -> list[IndexArray]:
    """Distribute the sequences of one data-parallel rank over exactly `count` microbatches of
    nearly equal cost.

    If the token budget does not permit this distribution, return the microbatches of `packed`
    instead, with empty ones added.

    Args:
        lengths: Length of each sequence of the batch.
        cost_S: Cost of each sequence of the batch.
        shard: Indices of the sequences of this rank.
        packed: Result of `_first_fit` for this rank, at most `count` microbatches.
        count: Number of microbatches.
        budget: Largest number of tokens of a microbatch.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    load = [0.0] * count
    for index in _descending(cost_S, shard):
        length = int(lengths[index])
        fitting = [n for n in range(count) if not bins[n] or tokens[n] + length <= budget]
        if not fitting:
            bins = [list(packed_bin) for packed_bin in packed]
            bins += [[] for _ in range(count - len(packed))]
            break
        best = min(fitting, key=lambda n: (load[n], n))
        bins[best].append(index)
        tokens[best] += length
        load[best] += float(cost_S[index])
    return [np.array(sorted(indices), dtype=np.int64) for indices in bins]
