"""The torch loss: its gradient is the slope of its value, and bad input is named."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron_async_kernels.loss_torch import divergence, policy_loss
from megatron_async_kernels.loss_types import (
    LossConfig,
    LossInputs,
    NonFiniteError,
)

from tests.kernels.loss_cases import (
    CONFIGS,
    DENOMINATORS,
    exact_k3,
    expected_slopes,
    kl_alone,
    make_inputs,
)

# The others detach part of their value by definition, or decide on rejection.
SMOOTH = ("ppo", "ppo dual, old", "ppo, kl k3, entropy", "reinforce", "sft")


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_is_the_slope_of_the_loss(name: str) -> None:
    """Central differences in every token."""
    config = CONFIGS[name]
    inputs = make_inputs([4, 6], mask_share=1.0)
    output = policy_loss(inputs, config, DENOMINATORS)
    step = 1e-6
    for token in range(10):
        values = []
        for sign in (1.0, -1.0):
            moved_T = inputs.logprobs_T.clone()
            moved_T[token] += sign * step
            moved = dataclasses.replace(inputs, logprobs_T=moved_T)
            values.append(float(policy_loss(moved, config, DENOMINATORS).loss_sum))
        slope = (values[0] - values[1]) / (2 * step)
        assert slope == pytest.approx(float(output.dlogp_T[token]), abs=1e-7)


@pytest.mark.parametrize("weight_upper", [4.0, 0.5])
def test_the_gradient_of_k3_does_not_cancel(weight_upper: float) -> None:
    inputs, config, denominators, distance_T = kl_alone(weight_upper)
    output = policy_loss(inputs, config, denominators)
    expected_T = expected_slopes(distance_T, weight_upper)
    torch.testing.assert_close(output.dlogp_T.double(), expected_T, rtol=3e-7, atol=0.0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 2e-15)])
def test_the_value_of_k3_does_not_cancel(dtype: torch.dtype, rtol: float) -> None:
    distance_T = kl_alone(1.0)[-1].to(dtype)
    expected_T = torch.tensor([exact_k3(d)[0] for d in distance_T.tolist()], dtype=torch.float64)
    found_T = divergence(-distance_T, "k3").double()
    torch.testing.assert_close(found_T, expected_T, rtol=rtol, atol=0.0)


def test_non_finite_input_is_named() -> None:
    inputs = make_inputs([3, 3], mask_share=1.0)
    broken_T = inputs.advantages_T.clone()
    broken_T[2] = torch.inf
    with pytest.raises(NonFiniteError, match="advantages has 1 non-finite"):
        policy_loss(dataclasses.replace(inputs, advantages_T=broken_T), LossConfig(), DENOMINATORS)


def test_missing_stream_is_named() -> None:
    inputs = dataclasses.replace(make_inputs([3]), old_logprobs_T=None)
    assert isinstance(inputs, LossInputs)
    with pytest.raises(ValueError, match="needs old_logprobs_T"):
        policy_loss(inputs, LossConfig(ratio_to="old"), DENOMINATORS)
