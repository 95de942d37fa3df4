"""The torch loss: its gradient is the slope of its value, and bad input is named."""

from __future__ import annotations

import pytest
import torch
from megatron_async_kernels.loss_torch import divergence, policy_loss

from tests.kernels.loss_cases import (
    exact_k3,
    expected_slopes,
    kl_alone,
)


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
