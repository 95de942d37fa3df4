"""Provides strategies for ragged batches and loss configurations, with the same rows packed and
padded.

Log-probs are multiples of 1/8, so that sums are exact, ties occur, and both sides of a comparison
have identical bits. Ratios far beyond the safety bound occur. Untrained tokens have the value NaN,
because they must not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from megatron_async_kernels.loss_types import LossConfig, RejectionRule

from tests.algorithms.oracle import Row

FIELDS = ("p", "old", "rollout", "ref", "entropy", "advantage", "v")
_GRID = 8


def _log_prob(low: int) -> st.SearchStrategy[float]:
    return st.integers(low * _GRID, 0).map(lambda n: n / _GRID)


# Mostly close policies, sometimes ratios up to e^70. The safety bound and ratio 1 occur exactly.
_NEAR = _log_prob(-3)
_ANY = st.one_of(_NEAR, _NEAR, _log_prob(-30), st.sampled_from([-20.0, -20.125, -70.0, 0.0]))
_ADVANTAGE = st.integers(-16, 16).map(lambda n: n / 8)


@dataclass(frozen=True)
class Case:
    """Rows of trained tokens, with the number of untrained tokens before each token and at the end
    of each row."""

    rows: list[Row]
    gaps: list[list[int]]

    def packed(self, name: str) -> torch.Tensor:
        """Return one field as a packed stream [T], with NaN at untrained tokens."""
        return torch.tensor(
            [
                value
                for row, gap in zip(self.rows, self.gaps, strict=True)
                for value in _with_gaps([token[name] for token in row], gap, math.nan)
            ],
            dtype=torch.float64,
        )

    @property
    def mask(self) -> torch.Tensor:
        """The 0/1 mask of trained tokens, [T]."""
        return torch.tensor(
            [
                value
                for row, gap in zip(self.rows, self.gaps, strict=True)
                for value in _with_gaps([1.0] * len(row), gap, 0.0)
            ],
            dtype=torch.float64,
        )

    @property
    def lag(self) -> torch.Tensor:
        """The lags [T], with the meaningless value 999 at untrained tokens."""
        return torch.tensor(
            [
                int(value)
                for row, gap in zip(self.rows, self.gaps, strict=True)
                for value in _with_gaps([token["lag"] for token in row], gap, 999.0)
            ],
            dtype=torch.int32,
        )

    @property
    def cu_seqlens(self) -> torch.Tensor:
        """The bounds of the rows in the packed stream, [S + 1]."""
        lengths = [len(row) + sum(gap) for row, gap in zip(self.rows, self.gaps, strict=True)]
        return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)

    def padded(self, stream: torch.Tensor, fill: float) -> torch.Tensor:
        """Return a packed stream as [B, L], with `fill` after the end of each row."""
        rows = stream.split(self.cu_seqlens.diff().tolist())
        width = max([row.numel() for row in rows] + [1])
        padded = [torch.cat([row, row.new_full((width - row.numel(),), fill)]) for row in rows]
        return torch.stack(padded)

    def unpack(self, stream: torch.Tensor) -> list[list[float]]:
        """Return the values of the trained tokens of a packed stream, row by row."""
        rows = stream.split(self.cu_seqlens.diff().tolist())
        masks = self.mask.split(self.cu_seqlens.diff().tolist())
        return [row[mask != 0].tolist() for row, mask in zip(rows, masks, strict=True)]

    def rows_of(self, index: list[int]) -> Case:
        """Return a case with the rows at these indices, in this order."""
        return Case([self.rows[i] for i in index], [self.gaps[i] for i in index])


def _with_gaps(values: list[float], gap: list[int], fill: float) -> list[float]:
    result: list[float] = []
    for value, untrained in zip(values, gap[:-1], strict=True):
        result += [fill] * untrained + [value]
    return result + [fill] * gap[-1]


_TOKEN = st.fixed_dictionaries(
    {
        "p": _ANY,
        "old": _ANY,
        "rollout": _ANY,
        "ref": _ANY,
        "entropy": st.integers(0, 24).map(lambda n: n / 8),
        "advantage": _ADVANTAGE,
        "v": st.integers(0, 16).map(lambda n: n / 8),
        "lag": st.integers(0, 11).map(float),
    }
)


@st.composite
def cases(draw: st.DrawFn, *, min_trained: int = 0) -> Case:
    """Draw 1 to 5 rows of 0 to 5 trained tokens, with prompts and untrained gaps; rows may be
    empty."""
    rows = draw(
        st.lists(st.lists(_TOKEN, max_size=5), min_size=1, max_size=5).filter(
            lambda rows: sum(map(len, rows)) >= min_trained
        )
    )
    gaps = [
        draw(st.lists(st.integers(0, 2), min_size=len(row) + 1, max_size=len(row) + 1))
        for row in rows
    ]
    return Case(rows, gaps)


def close(actual: float, expected: float, tolerance: float = 1e-6) -> bool:
    """Return whether `actual` is within `tolerance` of `expected`, absolutely or relatively; equal
    infinities are close, NaN is not."""
    if math.isnan(actual) or math.isnan(expected):
        return False
    return actual == expected or abs(actual - expected) <= tolerance * max(1.0, abs(expected))


def assert_close(actual: float, expected: float, what: str) -> None:
    """Assert that two numbers are close; the message names the number as `what`."""
    assert close(actual, expected), f"{what}: got {actual!r}, expected {expected!r}"


RULES = [
    RejectionRule("token", "k1", math.log(0.5), math.log(4.0)),
    RejectionRule("token", "k3", -math.inf, 0.3),
    RejectionRule("seq_sum", "k1", math.log(0.7), math.log(3.0)),
    RejectionRule("seq_mean", "k2", -math.inf, 0.5),
    RejectionRule("seq_mean", "k1", 0.0, 1.0),
    RejectionRule("seq_max", "k3", -math.inf, 2.0),
]

loss_configs = st.builds(
    LossConfig,
    surrogate=st.sampled_from(["reinforce", "aipo", "ppo_clip", "gspo", "cispo", "sft"]),
    ratio_to=st.sampled_from(["rollout", "old"]),
    aggregation=st.sampled_from(
        ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
    ),
    fixed_normalizer=st.sampled_from([1.0, 7.0]),
    clip_low=st.sampled_from([0.2, 0.0, 0.9]),
    clip_high=st.sampled_from([0.28, 0.0, 3.0]),
    dual_clip=st.sampled_from([None, 1.5, 3.0]),
    aipo_delta=st.sampled_from([8.0, 1.0, 0.5]),
    weight_level=st.sampled_from(["none", "token", "sequence"]),
    weight_upper=st.sampled_from([None, 5.0, 1.0]),
    weight_lower=st.sampled_from([None, 0.5, 1.0]),
    rejection=st.lists(st.sampled_from(RULES), max_size=2, unique=True).map(tuple),
    kl_estimator=st.sampled_from(["none", "k2", "k3"]),
    kl_coef=st.sampled_from([0.04, 1.5]),
    kl_weight_upper=st.sampled_from([2.0, 1.0]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    staleness_clip=st.sampled_from([2.0, 1.25]),
)
