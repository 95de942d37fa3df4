"""Rank correlations of a few runs' figures, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.papers.report import table


def ranks(values: Sequence[float]) -> np.ndarray:
    """From 1; equal values share the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's; nan when x or y is constant."""
    if len(set(x)) == 1 or len(set(y)) == 1:
        return float("nan")
    return float(np.corrcoef(ranks(x), ranks(y))[0, 1])


def correlations(columns: Mapping[str, Sequence[float]]) -> str:
    """The rank correlation of every two columns, as a table."""
    names = list(columns)
    rows = [
        (
            name,
            *(
                f"{rank_correlation(columns[name], columns[other]):.2f}" if place < row else ""
                for place, other in enumerate(names[:-1])
            ),
        )
        for row, name in enumerate(names)
        if row
    ]
    return table(("rank correlation", *names[:-1]), rows)
