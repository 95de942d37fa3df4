"""Groups a batch's sequences into microbatches for every data-parallel rank; pure and
deterministic.

Invariants
- Every sequence is in exactly one microbatch of one data-parallel rank, and is never split.
- All data-parallel ranks get the same number of microbatches, at least one, because Megatron's
  schedules and collectives run in step. A rank with less work gets smaller or empty microbatches
  (an empty one is run as two dummy tokens with a zero gradient).
- A microbatch exceeds the token budget only if it is a single sequence that is longer.
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
    """Relative forward cost of each sequence, in units of one token's matrix products, [S].

    A dense layer of width D costs about 24 D^2 floating point operations a token in its matrix
    products (QKV, output, a 4D feed-forward) and, causally, 2 L D a token in attention over a
    sequence of L tokens; hence L (1 + L / 12 D). The constants follow the usual count
    (arXiv 2104.04473, appendix); only the balance of work depends on them.
    """
    lengths = lengths_S.astype(np.float64)
    return lengths * (1.0 + lengths / (12.0 * hidden_size))


def plan_microbatches(
    lengths_S: npt.NDArray[np.integer], *, data_parallel: int, token_budget: int, hidden_size: int
) -> list[list[IndexArray]]:
    """Balance sequences over data-parallel ranks by cost, then fill microbatches to the token
    budget.

    Ranks are filled greedily, costliest sequence first (longest processing time rule: at most 4/3
    of the optimum, Graham 1969). The number of microbatches is what the fullest rank needs by
    first-fit decreasing; the other ranks spread their sequences over as many.

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
    """Sort indices by falling cost; equal costs by rising index, so that plans are reproducible."""
    return sorted((int(index) for index in indices), key=lambda index: (-cost_S[index], index))


def _first_fit(
    lengths: npt.NDArray[np.integer], cost_S: CostArray, shard: IndexArray, budget: int
) -> list[list[int]]:
    """Pack a shard's sequences by first-fit decreasing into bins of at most `budget` tokens.

    A sequence longer than `budget` gets its own bin.
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
    """Spread a shard's sequences over exactly `count` microbatches of nearly equal cost.

    If that would exceed the token budget, return the bins of first-fit (`packed`) and empty bins.
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
