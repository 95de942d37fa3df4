"""Numbers of a tensor's elements, in float64, that are defined for no element at all."""

import math

import torch


def total(values: torch.Tensor) -> float:
    """Return their sum."""
    return float(values.double().sum())


def mean(values: torch.Tensor) -> float:
    """Return their mean; 0 when there is nothing."""
    return total(values) / values.numel() if values.numel() else 0.0


def largest(values: torch.Tensor) -> float:
    """Return their maximum; -inf when there is nothing."""
    return float(values.double().max()) if values.numel() else -math.inf


def smallest(values: torch.Tensor) -> float:
    """Return their minimum; inf when there is nothing."""
    return -largest(-values.double())


def std(values: torch.Tensor, *, unbiased: bool) -> float:
    """Return the standard deviation (n - 1 or n), 0 for fewer than two values; two passes."""
    return float(values.double().std(correction=int(unbiased))) if values.numel() > 1 else 0.0
