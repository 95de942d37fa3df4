"""The fused entry on CPU: two steps whose gradient is that of the loss through the log-probs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from megatron_async_kernels import (
    is_loss,
    reference_token_logprob,
    token_logprob_is_loss,
)

from tests.kernels.loss_cases import CONFIGS, DENOMINATORS, make_inputs

LENGTHS = [6, 0, 11]


@pytest.mark.parametrize("name", ["ppo", "ppo, kl k3, entropy", "gspo", "rapid"])
def test_gradients_are_the_reference_chain(name: str) -> None:
    config, inputs = CONFIGS[name], make_inputs(LENGTHS)
    generator = torch.Generator().manual_seed(2)
    hidden_TD = torch.randn(17, 5, generator=generator, dtype=torch.float64).requires_grad_()
    weight_VD = torch.randn(23, 5, generator=generator, dtype=torch.float64).requires_grad_()
    targets_T = torch.randint(0, 20, (17,), generator=generator)
    output = token_logprob_is_loss(
        hidden_TD, weight_VD, targets_T, inputs, config, DENOMINATORS, vocab_size=20
    )
    mine = torch.autograd.grad(2 * output.loss, [hidden_TD, weight_VD])

    logprobs_T, entropy_T = reference_token_logprob(
        hidden_TD, weight_VD, targets_T, token_mask_T=inputs.mask_T, vocab_size=20
    )
    streams = dataclasses.replace(
        inputs, logprobs_T=logprobs_T.detach(), entropy_T=entropy_T.detach()
    )
    expected = is_loss(streams, config, DENOMINATORS)
    chain = expected.dlogp_T @ logprobs_T
    if expected.dentropy_T is not None:
        chain = chain + expected.dentropy_T @ entropy_T
    theirs = torch.autograd.grad(2 * chain, [hidden_TD, weight_VD])
    torch.testing.assert_close(output.loss, expected.loss_sum)
    torch.testing.assert_close(output.logprobs_T, logprobs_T.detach())
    for ours, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours, other)
