"""Spearman's rank correlation, as the papers' scripts print it."""

from __future__ import annotations

import math

import pytest

from benchmarks.papers.correlation import correlations, rank_correlation


def test_any_rising_line_correlates_fully() -> None:
    assert rank_correlation([1, 2, 4, 8, 16], [-3, -2, 0, 1, 900]) == pytest.approx(1)
    assert rank_correlation([1, 2, 4, 8, 16], [5, 4, 3, 2, -70]) == pytest.approx(-1)


def test_equal_values_share_a_rank() -> None:
    """Ranks 1.5, 1.5, 3, 4 against 1, 2, 3, 4: 4.5 / sqrt(5 * 4.5), by hand."""
    expected = 4.5 / math.sqrt(5 * 4.5)
    assert rank_correlation([1, 2, 3, 4], [7, 7, 8, 9]) == pytest.approx(expected)
    assert rank_correlation([2, 1, 3, 4], [7, 7, 8, 9]) == pytest.approx(expected)


def test_what_never_changes_has_none() -> None:
    assert math.isnan(rank_correlation([1, 2, 3], [4, 4, 4]))
    assert math.isnan(rank_correlation([4, 4, 4], [1, 2, 3]))


def test_every_pair_is_in_the_table_once() -> None:
    text = correlations({"H": [1, 2, 3], "time": [3, 2, 1], "length": [1, 3, 2]})
    assert text.splitlines()[2:] == ["| time | -1.00 |  |", "| length | 0.50 | -0.50 |"]
