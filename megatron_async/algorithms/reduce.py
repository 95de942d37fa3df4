"""Statistics over all data-parallel ranks, or over one process when there is no group.

Invariant: the result does not depend on how sequences are spread over ranks (up to rounding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True)
class Reducer:
    """Sums, extrema, means and deviations over the ranks of `group` (None: this process alone).

    Values are float64; every method is a collective when there is a group.
    """

    group: distributed.ProcessGroup | None = None

    def sum(self, *values: torch.Tensor) -> list[float]:
        """Global sum of each tensor's elements (one collective for all of them)."""
        totals = torch.stack([value.double().sum() for value in values])
        if self.group is not None:
            distributed.all_reduce(totals, group=self.group)
        return list(totals.tolist())

    def max(self, values: torch.Tensor) -> float:
        """Global maximum; -inf when no rank has an element."""
        largest = torch.cat([values.new_full((1,), -math.inf), values.reshape(-1)]).double().max()
        if self.group is not None:
            distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=self.group)
        return float(largest)

    def min(self, values: torch.Tensor) -> float:
        """Global minimum; inf when no rank has an element."""
        return -self.max(-values)

    def mean(self, values: torch.Tensor) -> float:
        """Global mean; 0 when there is nothing."""
        total, count = self.sum(values, torch.ones_like(values))
        return total / count if count else 0.0

    def std(self, values: torch.Tensor, *, unbiased: bool) -> float:
        """Global standard deviation (n - 1 or n), 0 for fewer than two values; two passes."""
        total, count = self.sum(values, torch.ones_like(values))
        if count < 2:
            return 0.0
        (squares,) = self.sum((values.double() - total / count).square())
        return math.sqrt(squares / (count - 1.0 if unbiased else count))

    def gather(self, values_SK: torch.Tensor) -> tuple[torch.Tensor, slice]:
        """Rows of all ranks in rank order, and which of them are this rank's."""
        if self.group is None:
            return values_SK, slice(0, values_SK.shape[0])
        size, rank = distributed.get_world_size(self.group), distributed.get_rank(self.group)
        count = torch.tensor([values_SK.shape[0]], device=values_SK.device)
        counts = [torch.zeros_like(count) for _ in range(size)]
        distributed.all_gather(counts, count, group=self.group)
        rows = [int(entry) for entry in counts]
        padded = values_SK.new_zeros((max(rows), values_SK.shape[1]))
        padded[: values_SK.shape[0]] = values_SK
        parts = [torch.zeros_like(padded) for _ in range(size)]
        distributed.all_gather(parts, padded, group=self.group)
        start = sum(rows[:rank])
        everything = torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])
        return everything, slice(start, start + rows[rank])
