"""Tests the rules by which an engine's weights are verified: the error of the engine's log-probs
and its limits."""

from __future__ import annotations

import math

import numpy as np
import pytest

from megatron_async.trajectory.types import PolicyVersion
from megatron_async.weight_sync.verify import (
    BASELINE_UPDATES,
    EXACT_TOLERANCE,
    GROSS_LEAST,
    GROSS_MOST,
    RatioCheck,
    RatioError,
)

VERSION, OTHER = PolicyVersion(2, 9), PolicyVersion(2, 8)


def error(mean: float) -> RatioError:
    return RatioError(mean, 2 * mean)


def test_ratio_error_holds_mean_and_largest_log_prob_difference() -> None:
    engine, trainer = np.array([-1.0, -2.0], np.float32), np.array([-1.5, -2.0], np.float32)
    assert RatioError.of(engine, trainer) == RatioError(0.25, 0.5)


@pytest.mark.parametrize(("temperature", "limit"), [(1.0, 1e-4), (2.0, 1e-4), (0.1, 1e-3)])
def test_ratio_check_allows_only_rounding_errors_in_float32(
    temperature: float, limit: float
) -> None:
    rule = RatioCheck(tolerance=None, temperature=temperature)
    assert rule.limit(exact=True) == pytest.approx(limit)
    assert rule.passes(error(0.9 * limit), exact=True)
    assert not rule.passes(error(1.1 * limit), exact=True)
    assert EXACT_TOLERANCE == 1e-4


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("tolerance", [None, 0.5])
def test_ratio_check_fails_when_a_log_prob_is_nan(exact: bool, tolerance: float | None) -> None:
    rule = RatioCheck(tolerance=tolerance, temperature=1.0)
    trainer = np.zeros(2, np.float32)
    found = RatioError.of(np.array([0, math.nan], np.float32), trainer)
    assert not rule.passes(found, exact=exact)


@pytest.mark.parametrize(("usual", "limit"), [(0.001, GROSS_LEAST), (0.03, 0.3), (0.4, GROSS_MOST)])
def test_ratio_check_learns_usual_error_and_fails_gross_ones_in_half_precision(
    usual: float, limit: float
) -> None:
    rule = RatioCheck(tolerance=None, temperature=1.0)
    for update in range(BASELINE_UPDATES):
        assert rule.limit(exact=False) == GROSS_MOST
        assert rule.drift([error(usual)]) is None
        assert rule.passes(error(usual), exact=False), "a healthy run must continue"
        rule.learn([error(usual * (0.5 + update / 3)), error(usual)])
    assert rule.baseline == pytest.approx(usual)
    assert rule.limit(exact=False) == pytest.approx(limit)
    assert rule.drift([error(usual), error(2 * usual)]) == pytest.approx(2)
    assert not rule.passes(error(1.01 * limit), exact=False)
    rule.learn([error(100.0)])
    assert rule.baseline == pytest.approx(usual), "the limit must be learned only once"


def test_ratio_check_limit_is_the_configured_tolerance() -> None:
    rule = RatioCheck(tolerance=0.05, temperature=0.1)
    assert rule.limit(exact=True) == rule.limit(exact=False) == 0.05
