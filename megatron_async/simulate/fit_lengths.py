"""Fit long-tailed distributions to recorded response lengths, by maximum likelihood.

A response that was cut (or dropped before its end) shows only that it would have been longer: it
is censored, and enters the likelihood by its survival function. Taken at face value, cut responses
would make the tail, which is what asynchrony is about, look short.

Invariants
- Pure: lengths and flags in, parameters out. Fits of the same data are the same.
- Both families are fitted as the simulator draws from them (`simulate.lengths`): log-normal by
  median and sigma, Weibull by scale and shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from megatron_async.errors import UserError
from megatron_async.simulate.recorded_lengths import Array, Recorded

_ITERATIONS = 20_000
_TOLERANCE = 1e-10
_SMALLEST_SAMPLE = 10
_SHAPES = (1e-3, 1e3)


@dataclass(frozen=True)
class Fit:
    """A fitted family; `settings` are those of `simulate.lengths` besides `distribution`.

    `log_likelihood` is comparable between the fits of one sample. `distance` is the largest
    difference between the fitted distribution function and the product-limit estimate
    (Kaplan-Meier) of the sample's.
    """

    distribution: str
    settings: dict[str, float]
    log_likelihood: float
    distance: float


def fit_lengths(sample: Recorded) -> list[Fit]:
    """The families, the more likely one first. Raises UserError for a sample without a fit."""
    whole = sample.lengths[~sample.censored]
    if len(whole) < _SMALLEST_SAMPLE:
        raise UserError(
            f"lengths cannot be fitted to {len(whole)} responses that ended by themselves "
            f"(of {len(sample.lengths)}); at least {_SMALLEST_SAMPLE} are needed"
        )
    if whole.min() == whole.max():
        raise UserError(
            f"lengths cannot be fitted: all {len(whole)} responses that ended by themselves have "
            f"{whole[0]:g} tokens; use simulate.lengths.distribution constant"
        )
    fits = [_lognormal(sample), _weibull(sample)]
    return sorted(fits, key=lambda fit: -fit.log_likelihood)


def _lognormal(sample: Recorded) -> Fit:
    """Fit by expectation and maximisation; a censored length counts as the mean beyond it."""
    y = np.log(sample.lengths)
    ended, (bounds, counts) = y[~sample.censored], np.unique(y[sample.censored], return_counts=True)
    mu, sigma = float(y.mean()), float(y.std())
    for _ in range(_ITERATIONS):
        z = (bounds - mu) / sigma
        hazard = np.exp(_log_density(z) - _log_survival(z))
        mean = mu + sigma * hazard
        square = mean**2 + sigma**2 * (1 + hazard * (z - hazard))
        new_mu = float(ended.sum() + counts @ mean) / len(y)
        new_sigma = math.sqrt(float((ended**2).sum() + counts @ square) / len(y) - new_mu**2)
        moved = max(abs(new_mu - mu), abs(new_sigma - sigma))
        mu, sigma = new_mu, new_sigma
        if moved < _TOLERANCE * sigma:
            break
    else:
        raise UserError(
            f"the log-normal fit did not converge: {len(y) - len(ended)} of {len(y)} responses "
            "were cut"
        )
    z = (y - mu) / sigma
    beyond = _log_survival(z)
    likelihood = np.where(sample.censored, beyond, _log_density(z) - math.log(sigma) - y)
    settings = {"median": math.exp(mu), "sigma": sigma}
    return Fit("lognormal", settings, float(likelihood.sum()), _distance(sample, -np.expm1(beyond)))


def _weibull(sample: Recorded) -> Fit:
    """The likelihood equation of the shape has one root, which bisection finds."""
    largest, ended = float(sample.lengths.max()), ~sample.censored
    x = sample.lengths / largest
    logs = np.log(x)
    mean_log = float(logs[ended].mean())

    def slope(shape: float) -> float:
        powers = x**shape
        return float((powers * logs).sum() / powers.sum()) - 1 / shape - mean_log

    low, high = _SHAPES
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if slope(middle) > 0 else (middle, high)
    shape = math.sqrt(low * high)
    scale = largest * (float((x**shape).sum()) / int(ended.sum())) ** (1 / shape)
    ratio = sample.lengths / scale
    density = math.log(shape / scale) + (shape - 1) * np.log(ratio)
    likelihood = np.where(ended, density, 0.0) - ratio**shape
    settings = {"scale": scale, "shape": shape}
    fitted = -np.expm1(-(ratio**shape))
    return Fit("weibull", settings, float(likelihood.sum()), _distance(sample, fitted))


def _distance(sample: Recorded, fitted: Array) -> float:
    """Largest gap at the lengths of responses that ended, before and after each step."""
    order = np.lexsort((sample.censored, sample.lengths))  # at one length, censored ones last
    lengths, ended = sample.lengths[order], ~sample.censored[order]
    at_risk = np.arange(len(lengths), 0, -1)
    survival = np.cumprod(np.where(ended, 1 - 1 / at_risk, 1.0))
    last = np.append(lengths[1:] != lengths[:-1], True)  # of equal lengths, which are one step
    after = 1 - survival[last]
    before = np.concatenate([[0.0], after[:-1]])
    at_step = fitted[order][last]
    gaps = np.maximum(np.abs(at_step - after), np.abs(at_step - before))
    return float(gaps[after > before].max())


def _log_density(z: Array) -> Array:
    return -0.5 * z**2 - 0.5 * math.log(2 * math.pi)


def _log_survival(z: Array) -> Array:
    """log of 1 - Phi(z); far in the tail by its asymptotic series."""
    return np.array([_log_survival_at(float(value)) for value in z])


def _log_survival_at(z: float) -> float:
    if z < 25:
        return math.log(0.5 * math.erfc(z / math.sqrt(2)))
    return -0.5 * z * z - 0.5 * math.log(2 * math.pi) - math.log(z) + math.log1p(-1 / (z * z))
