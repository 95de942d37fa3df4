"""Tests the loss that an algorithm calls: every backend returns the same numbers and raises the
same errors."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from megatron_async_kernels import is_loss
from megatron_async_kernels.loss_torch import policy_loss
from megatron_async_kernels.loss_types import (
    Denominators,
    LossConfig,
    LossInputs,
    LossMetrics,
    LossOutput,
    RejectionRule,
)
from megatron_async_kernels.triton_loss_spec import loss_spec

from megatron_async.algorithms.algorithm import Algorithm
from megatron_async.config.model import ModelConfig
from megatron_async.trainer.capabilities import Capabilities, choose
from tests.algorithms.batches import current_logprobs, device_batch
from tests.algorithms.test_algorithm import VARIANTS, algorithm_of

CUDA = torch.device("cuda")
RULE = RejectionRule("token", "k1", -1.0, 1.0)

# The variants of test_algorithm.py, and two more: with an entropy bonus, and with rejection rules
# in a loss that uses the ratio.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    **VARIANTS,
    "entropy": ("copris", {"entropy_coef": 0.05}),
    "rules": (
        "copris",
        {
            "correction": {
                "preset": "bypass_ppo_clip",
                "rollout_rs": "token_k1,seq_mean_k2",
                "rollout_rs_threshold": "0.3_3.0,0.9",
            }
        },
    ),
}


def microbatch(algorithm: Algorithm, seed: int) -> tuple[LossInputs, Denominators]:
    """Return the loss inputs of a whole prepared batch, in float64, with one sequence without
    trained tokens."""
    batch = device_batch(seed=seed)
    logprobs_T = current_logprobs(batch, seed)
    prepared, _ = algorithm.prepare(batch)
    prepared, denominators = algorithm.prepare_minibatch(prepared, logprobs_T)
    generator = torch.Generator().manual_seed(seed)
    entropy_T = torch.rand(len(logprobs_T), generator=generator, dtype=torch.float64)
    return algorithm.inputs(prepared, logprobs_T, entropy_T), denominators


def assert_same(actual: LossOutput, expected: LossOutput, tolerance: float) -> None:
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False, "check_device": False}
    assert type(actual) is LossOutput and type(actual.metrics) is LossMetrics
    torch.testing.assert_close(actual.loss_sum, expected.loss_sum, **close)
    torch.testing.assert_close(actual.dlogp_T, expected.dlogp_T, **close)
    assert (actual.dentropy_T is None) == (expected.dentropy_T is None)
    if actual.dentropy_T is not None:
        torch.testing.assert_close(actual.dentropy_T, expected.dentropy_T, **close)
    for field in fields(LossMetrics):
        pair = (getattr(actual.metrics, field.name), getattr(expected.metrics, field.name))
        assert pair[0].dtype == torch.float64
        torch.testing.assert_close(*pair, **close)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", SETTINGS)
def test_policy_loss_on_cuda_equals_the_loss_on_the_cpu(name: str) -> None:
    recipe, settings = SETTINGS[name]
    algorithm = algorithm_of(recipe, **settings)
    inputs, denominators = microbatch(algorithm, 0)
    expected = policy_loss(inputs, algorithm.loss_config, denominators)
    streams = {name: x for name, x in vars(inputs).items() if isinstance(x, torch.Tensor)}
    on_device = LossInputs(
        **{
            name: stream.to(CUDA, _at_most_float32(stream.dtype))
            for name, stream in streams.items()
        }
    )
    actual = algorithm.loss(on_device, denominators)
    assert actual.dlogp_T.is_cuda
    assert_same(actual, expected, 1e-4)


def _at_most_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


@pytest.mark.parametrize(("count", "fits"), [(4, True), (5, False)])
def test_triton_loss_refuses_more_than_four_rejection_rules(count: int, fits: bool) -> None:
    config = LossConfig(rejection=(RULE,) * count)
    inputs, denominators = microbatch(algorithm_of("copris"), 0)
    if fits:
        assert loss_spec(inputs, config).num_rules == count
    else:
        with pytest.raises(ValueError, match="at most 4 rejection rules, got 5"):
            is_loss(inputs, config, denominators, backend="triton")


@pytest.mark.parametrize(
    ("cuda", "triton", "line"),
    [
        (None, "3.8.0", "plain torch (no CUDA device)"),
        ("12.9", "3.8.0", "triton 3.8.0; plain torch with more than 4 rejection rules"),
        ("12.9", None, "plain torch (triton is not installed)"),
    ],
)
def test_capabilities_name_the_backend_of_the_policy_loss(
    cuda: str | None, triton: str | None, line: str
) -> None:
    found = Capabilities(cuda, cuda and "a GPU", None, None, triton)
    assert ("policy loss", line) in choose(ModelConfig(), found).lines()
