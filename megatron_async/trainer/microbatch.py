"""From a batch of sequences to microbatches of every data-parallel rank: pure and deterministic.

Invariants
- Every sequence is in exactly one microbatch of one data-parallel rank, whole.
- All data-parallel ranks get the same number of microbatches, at least one, because Megatron's
  schedules and collectives run in step; a rank that has less to do gets smaller ones or empty
  ones (no sequences, replaced by two dummy tokens with a zero gradient when it is run).
- A microbatch never exceeds the token budget, but for a single sequence that is longer.
- No padding. The plan depends on lengths, budget and rank count only, so every rank computes the
  same plan from the same batch and nothing needs to be communicated.
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
    """Balance sequences over ranks by cost, then fill microbatches to the token budget.

    Returns the indices into the batch, ascending, of each microbatch of each data-parallel rank.
    Ranks are filled greedily, costliest sequence first (longest processing time rule: at most
    4/3 of the optimum, Graham 1969). The number of microbatches is what the fullest rank needs by
    first-fit decreasing; the others spread their sequences over as many.
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


def balance(cost_S: CostArray, parts: int) -> list[IndexArray]:
    """Indices of each of `parts` shards, ascending, with total costs as even as greedy gets."""
    heap = [(0.0, part) for part in range(parts)]
    members: list[list[int]] = [[] for _ in range(parts)]
    for index in _descending(cost_S, np.arange(len(cost_S))):
        load, part = heapq.heappop(heap)
        members[part].append(index)
        heapq.heappush(heap, (load + float(cost_S[index]), part))
    return [np.array(sorted(part), dtype=np.int64) for part in members]


def _descending(cost_S: CostArray, indices: npt.NDArray[np.integer]) -> list[int]:
    """Indices by falling cost; equal costs by rising index, so that plans are reproducible."""
    return sorted((int(index) for index in indices), key=lambda index: (-cost_S[index], index))


def _first_fit(
    lengths: npt.NDArray[np.integer], cost_S: CostArray, shard: IndexArray, budget: int
) -> list[list[int]]:
    """First-fit decreasing: bins of at most `budget` tokens, longer sequences alone."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in _descending(cost_S, shard):
        length = int(lengths[index])
        slot = next((slot for slot, free in enumerate(room) if free >= length), None)
        if slot is None:
            bins.append([index])
            room.append(budget - length)
        else:
            bins[slot].append(index)
            room[slot] -= length
    return bins


def _spread(
    lengths: npt.NDArray[np.integer],
    cost_S: CostArray,
    shard: IndexArray,
    packed: Sequence[Sequence[int]],
    count: int,
    budget: int,
) -> list[IndexArray]:
    """Exactly `count` microbatches of even cost; the first-fit bins where evenness breaks it."""
    bins: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    load = [0.0] * count
    for index in _descending(cost_S, shard):
        length = int(lengths[index])
        fitting = [
            slot for slot in range(count) if not bins[slot] or tokens[slot] + length <= budget
        ]
        if not fitting:
            bins = [list(packed_bin) for packed_bin in packed]
            bins += [[] for _ in range(count - len(packed))]
            break
        slot = min(fitting, key=lambda slot: (load[slot], slot))
        bins[slot].append(index)
        tokens[slot] += length
        load[slot] += float(cost_S[index])
    return [np.array(sorted(indices), dtype=np.int64) for indices in bins]
