"""Tests of the kernels on a CUDA device against the float64 reference; skipped without a device."""

from __future__ import annotations

import pytest
import torch
from megatron_async_kernels import is_loss, policy_loss, reference_token_logprob, token_logprob
from megatron_async_kernels.loss_types import LossInputs

from tests.kernels.loss_cases import CONFIGS, DENOMINATORS, assert_same_output, make_inputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-4}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(300, 1000, 256), (77, 5003, 200), (129, 333, 37)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_gpu_head_matches_the_float64_reference(
    dtype: torch.dtype, shape: tuple[int, int, int], deterministic: bool
) -> None:
    tokens, vocab, hidden = shape
    generator = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(tokens, hidden, generator=generator).to(dtype).cuda()
    weight_VD = (torch.randn(vocab, hidden, generator=generator) / 8).to(dtype).cuda()
    targets_T = torch.randint(0, vocab - 5, (tokens,), generator=generator).cuda()
    mask_T = (torch.rand(tokens, generator=generator) < 0.6).cuda()
    exact = [hidden_TD.double().requires_grad_(), weight_VD.double().requires_grad_()]
    mine = [hidden_TD.requires_grad_(), weight_VD.requires_grad_()]
    actual = token_logprob(
        mine[0],
        mine[1],
        targets_T,
        token_mask=mask_T,
        vocab_size=vocab - 5,
        return_entropy=True,
        deterministic=deterministic,
        backend="triton",
    )
    expected = reference_token_logprob(
        exact[0],
        exact[1],
        targets_T,
        token_mask_T=mask_T,
        vocab_size=vocab - 5,
    )
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=2e-4)
    (actual[0].sum() + 0.3 * actual[1].sum()).backward()
    (expected[0].sum() + 0.3 * expected[1].sum()).backward()
    for ours, theirs in zip(mine, exact, strict=True):
        assert ours.grad is not None and theirs.grad is not None
        scale = float(theirs.grad.abs().max())
        torch.testing.assert_close(
            ours.grad.double(), theirs.grad, rtol=0, atol=TOLERANCE[dtype] * scale
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_gpu_loss_matches_the_float64_reference(name: str) -> None:
    inputs = make_inputs([5, 0, 4091, 600, 1, 9000], dtype=torch.float32)
    streams = {key: x.cuda() for key, x in vars(inputs).items() if isinstance(x, torch.Tensor)}
    on_gpu = LossInputs(**streams)
    wide = LossInputs(
        **{key: x.double() if x.is_floating_point() else x for key, x in streams.items()}
    )
    expected = policy_loss(wide, CONFIGS[name], DENOMINATORS)
    actual = is_loss(on_gpu, CONFIGS[name], DENOMINATORS, backend="triton")
    assert_same_output(actual, expected, rtol=3e-5, atol=3e-5)
