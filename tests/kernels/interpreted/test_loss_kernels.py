"""Tests of the loss kernels in Triton's interpreter against the torch loss in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron_async_kernels.is_loss import is_loss
from megatron_async_kernels.loss_torch import policy_loss
from megatron_async_kernels.loss_types import LossConfig, LossInputs, NonFiniteError
from megatron_async_kernels.triton_head import interpreted

from tests.kernels.loss_cases import (
    CONFIGS,
    DENOMINATORS,
    assert_same_output,
    exact_k3,
    expected_slopes,
    kl_alone,
    make_inputs,
)

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")

# One sequence spans two of the kernels' chunks of 4,096 tokens; two sequences are empty.
LENGTHS = [5, 0, 4000, 600, 1, 0, 30]


def compare(inputs: LossInputs, config: LossConfig) -> None:
    """Compare the kernel in float32 with the reference in float64, on the same float32 values."""
    wide = {
        field.name: value.double()
        for field in dataclasses.fields(inputs)
        if isinstance(value := getattr(inputs, field.name), torch.Tensor)
        and value.is_floating_point()
    }
    expected = policy_loss(dataclasses.replace(inputs, **wide), config, DENOMINATORS)
    actual = is_loss(inputs, config, DENOMINATORS, backend="triton")
    assert_same_output(actual, expected, rtol=3e-5, atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_triton_loss_matches_torch_with_every_configuration(name: str) -> None:
    compare(make_inputs(LENGTHS, dtype=torch.float32), CONFIGS[name])


@pytest.mark.parametrize("name", ["ppo dual, old", "gspo", "sequence rejection", "rapid"])
@pytest.mark.parametrize("lengths", [[], [0, 0], [1], [512], [4096, 3]])
def test_triton_loss_matches_torch_for_edge_shapes(name: str, lengths: list[int]) -> None:
    compare(make_inputs(lengths, dtype=torch.float32), CONFIGS[name])


@pytest.mark.parametrize("name", ["ppo, kl k3, entropy", "gspo"])
@pytest.mark.parametrize("mask_share", [0.0, 1.0])
def test_triton_loss_matches_torch_when_all_or_no_tokens_are_masked(
    name: str, mask_share: float
) -> None:
    compare(make_inputs([40, 700], mask_share=mask_share, dtype=torch.float32), CONFIGS[name])


@pytest.mark.parametrize("name", ["ppo", "aipo, kl k2", "cispo"])
def test_triton_loss_matches_torch_beyond_the_safety_bound(name: str) -> None:
    """Gradients are compared relative to the largest: sums of weights up to 5e8 exceed absolute
    tolerances."""
    inputs = make_inputs([40, 700], drift=15.0, dtype=torch.float32)
    expected = policy_loss(inputs, CONFIGS[name], DENOMINATORS)
    actual = is_loss(inputs, CONFIGS[name], DENOMINATORS, backend="triton")
    scale = float(expected.dlogp_T.abs().max())
    torch.testing.assert_close(
        actual.dlogp_T / scale, expected.dlogp_T / scale, rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(actual.metrics.sums_M, expected.metrics.sums_M, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("weight_upper", [4.0, 0.5])
def test_k3_and_its_gradient_do_not_cancel(weight_upper: float) -> None:
    inputs, config, denominators, distance_T = kl_alone(weight_upper)
    output = is_loss(inputs, config, denominators, backend="triton")
    expected_T = expected_slopes(distance_T, weight_upper)
    torch.testing.assert_close(output.dlogp_T.double(), expected_T, rtol=1e-6, atol=0.0)
    for token in range(0, len(distance_T), 20):
        cu_S1 = torch.tensor([0, 1])
        streams = {
            field.name: value[token : token + 1]
            for field in dataclasses.fields(inputs)
            if isinstance(value := getattr(inputs, field.name), torch.Tensor)
        }
        alone = LossInputs(**{**streams, "cu_seqlens_S1": cu_S1})
        value = is_loss(alone, config, denominators, backend="triton").loss_sum
        exact = min(weight_upper, 1.0) * exact_k3(float(distance_T[token]))[0]
        assert float(value) == pytest.approx(exact, rel=1e-6)


def test_triton_loss_repeats_bit_for_bit() -> None:
    inputs = make_inputs(LENGTHS, dtype=torch.float32)
    first, second = (
        is_loss(inputs, CONFIGS["gspo"], DENOMINATORS, backend="triton") for _ in range(2)
    )
    assert torch.equal(first.dlogp_T, second.dlogp_T)
    assert torch.equal(first.metrics.sums_M, second.metrics.sums_M)


@pytest.mark.parametrize(
    "stream", ["logprobs_T", "rollout_logprobs_T", "advantages_T", "is_weights_T", "entropy_T"]
)
def test_triton_loss_names_a_nonfinite_input(stream: str) -> None:
    inputs = make_inputs([30, 30], mask_share=1.0, dtype=torch.float32)
    broken_T = getattr(inputs, stream).clone()
    broken_T[17] = -torch.inf
    broken = dataclasses.replace(inputs, **{stream: broken_T})
    with pytest.raises(NonFiniteError, match=stream.removesuffix("_T")):
        is_loss(broken, LossConfig(), DENOMINATORS, backend="triton")


def test_triton_loss_accepts_strided_streams() -> None:
    inputs = make_inputs([40, 7], dtype=torch.float32)
    strided_T = torch.stack([inputs.logprobs_T, inputs.logprobs_T + 1.0], dim=1)[:, 0]
    assert not strided_T.is_contiguous()
    compare(dataclasses.replace(inputs, logprobs_T=strided_T), CONFIGS["ppo"])


def test_triton_loss_accepts_missing_optional_streams() -> None:
    inputs = make_inputs([40, 700], lag=False, correction=False, dtype=torch.float32)
    inputs = dataclasses.replace(inputs, old_logprobs_T=None, ref_logprobs_T=None, entropy_T=None)
    compare(inputs, CONFIGS["ppo"])
