"""Tests rollout correction: every weight, mask and metric equals the oracle's, for padded and for
packed batches."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_async_kernels.loss_types import NonFiniteError

from megatron_async.algorithms.correction import compute_rollout_correction
from tests.algorithms import oracle
from tests.algorithms.cases import Case, assert_close, cases

THRESHOLDS = [2.0, 0.75, "5.0", "0.5_2.0", "0.5_5.0", "1.0_1.0", 1e-9]
OPTIONS: dict[str, list[float | str]] = {
    "k1": ["0.5_2.0", "0.7_1.3", "1.5", "1.0_4.0", "0.999_1.001"],
    "k2": [0.01, 0.5, "2.0", 100.0],
    "k3": [0.01, "0.3", 5.0, 1e6],
}
NAMES = [
    f"{level}_{k}"
    for level in ("token", "seq_sum", "seq_mean", "seq_max")
    for k in OPTIONS
    if (level, k) != ("seq_max", "k1")
]


@st.composite
def rejections(draw: st.DrawFn) -> tuple[list[str], list[float | str]]:
    names = draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True))
    return names, [draw(st.sampled_from(OPTIONS[name[-2:]])) for name in names]


def run(case: Case, *, pad: bool, **settings_: Any) -> tuple[Any, ...]:
    old, rollout, mask = case.packed("old"), case.packed("rollout"), case.mask
    if not pad:
        return compute_rollout_correction(
            old, rollout, mask, cu_seqlens=case.cu_seqlens, **settings_
        )
    weights, kept, metrics = compute_rollout_correction(
        case.padded(old, math.nan),
        case.padded(rollout, math.nan),
        case.padded(mask, 0),
        **settings_,
    )
    real = case.padded(torch.ones_like(mask), 0) != 0
    assert kept[~real].sum() == 0
    return None if weights is None else weights[real], kept[real], metrics


@given(
    case=cases(min_trained=1),
    level=st.sampled_from([None, "token", "sequence"]),
    threshold=st.sampled_from(THRESHOLDS),
    normalize=st.booleans(),
    rejection=rejections(),
    pad=st.booleans(),
)
@settings(max_examples=300)
def test_correction_weights_masks_and_metrics_equal_the_oracle(
    case: Case,
    level: str | None,
    threshold: float | str,
    normalize: bool,
    rejection: tuple[list[str], list[float | str]],
    pad: bool,
) -> None:
    names, thresholds = rejection
    weights, kept, metrics = run(
        case,
        pad=pad,
        rollout_is=level,
        rollout_is_threshold=threshold,
        rollout_is_batch_normalize=normalize,
        rollout_rs=",".join(names) or None,
        rollout_rs_threshold=",".join(map(str, thresholds)) or None,
    )
    expected = oracle.correction(
        case.rows,
        level=level,
        threshold=threshold,
        normalize=normalize,
        options=names,
        thresholds=thresholds,
    )
    assert metrics.keys() == expected.metrics.keys()
    for name, value in expected.metrics.items():
        assert_close(metrics[name], value, name)
    assert case.unpack(kept) == [[float(keep) for keep in row] for row in expected.keep]
    assert (weights is None) == (expected.weights is None)
    if weights is not None and expected.weights is not None:
        for got, wanted in zip(case.unpack(weights), expected.weights, strict=True):
            for a, b in zip(got, wanted, strict=True):
                assert_close(a, b, "weight")
        assert weights[case.mask == 0].abs().sum() == 0, "untrained tokens have weight 0"


def packed(old: list[float], rollout: list[float], lengths: list[int]) -> dict:
    return {
        "old_logprobs": torch.tensor(old, dtype=torch.float64),
        "rollout_logprobs": torch.tensor(rollout, dtype=torch.float64),
        "response_mask": torch.ones(len(old), dtype=torch.float64),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
    }


def test_correction_weights_have_no_gradient_and_keep_the_dtype() -> None:
    old = torch.zeros(3, requires_grad=True)
    weights, mask, _ = compute_rollout_correction(
        old,
        torch.zeros(3),
        torch.ones(3, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, 3]),
        rollout_is="sequence",
    )
    assert weights is not None and not weights.requires_grad
    assert weights.dtype == torch.float32 and mask.dtype == torch.int64


def test_rejection_aliases_equal_their_options() -> None:
    args = packed([1.0, 0.0, 0.25], [0.0, 0.0, 0.0], [2, 1])
    for alias, option in (("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")):
        by_alias = compute_rollout_correction(**args, rollout_rs=alias, rollout_rs_threshold=1.5)
        by_name = compute_rollout_correction(**args, rollout_rs=option, rollout_rs_threshold=1.5)
        assert torch.equal(by_alias[1], by_name[1]) and by_alias[2] == by_name[2]


@pytest.mark.parametrize("name", ["old_logprobs", "rollout_logprobs"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_correction_names_the_input_that_is_not_finite(name: str, value: float) -> None:
    args = packed([0.0, 0.0], [0.0, 0.0], [2])
    args[name][1] = value
    with pytest.raises(NonFiniteError, match=rf"^{name} has 1 non-finite"):
        compute_rollout_correction(**args)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"rollout_is": "row"}, "rollout_is must be 'token' or 'sequence', got 'row'"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "rollout_is_threshold .* '2_1'"),
        ({"rollout_is": "token", "rollout_is_threshold": True}, "rollout_is_threshold .* True"),
        ({"rollout_is": "token", "rollout_is_threshold": -1.0}, "must be positive"),
        ({"rollout_rs": "token_k1"}, "needs rollout_rs_threshold"),
        ({"rollout_rs": "token_k4", "rollout_rs_threshold": 1}, "option 'token_k4' is not one of"),
        ({"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2}, "'seq_max_k1' is not one of"),
        ({"rollout_rs": "token_k2", "rollout_rs_threshold": "1.0_2.0"}, "one upper bound"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 0.5}, "must be >= 1"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "2,2,2"}, "one for each of"),
        ({"rollout_rs": ",", "rollout_rs_threshold": 2}, "at least one option"),
    ],
)
def test_correction_refuses_malformed_settings(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compute_rollout_correction(**packed([0.0], [0.0], [1]), **settings_)


def test_single_threshold_applies_to_all_options_and_duplicates_count_once() -> None:
    args = packed([0.5, 0.0], [0.0, 0.0], [1, 1])
    kept = compute_rollout_correction(
        **args, rollout_rs="token_k2, token_k3,token_k2", rollout_rs_threshold=0.1
    )[1]
    assert kept.tolist() == [0.0, 1.0]
    twice = compute_rollout_correction(
        **args, rollout_rs="token_k2,token_k2,token_k3", rollout_rs_threshold="9.0,0.1"
    )[1]
    assert twice.tolist() == [0.0, 1.0]


def test_correction_raises_when_shapes_differ_or_no_token_is_trained() -> None:
    args = packed([0.0, 0.0], [0.0, 0.0], [2])
    with pytest.raises(ValueError, match="shapes differ"):
        compute_rollout_correction(**{**args, "response_mask": torch.ones(3)})
    with pytest.raises(ValueError, match=r"\[T\] with them"):
        compute_rollout_correction(**{**args, "cu_seqlens": None})
    with pytest.raises(ValueError, match="no trained token"):
        compute_rollout_correction(**{**args, "response_mask": torch.zeros(2)})
