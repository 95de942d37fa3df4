"""The fused entry equals log-probs followed by the loss, alone and on vocabulary shards."""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch
import torch.distributed as dist
from megatron_async_kernels import FusedOutput, token_logprob_is_loss
from megatron_async_kernels.triton_head import interpreted
from torch import Tensor

from tests.distributed import run_ranks
from tests.kernels.loss_cases import CONFIGS, DENOMINATORS, make_inputs

pytestmark = pytest.mark.skipif(not interpreted(), reason="needs TRITON_INTERPRET=1")

LENGTHS = [9, 0, 30, 1, 22]
VOCAB, PADDED, HIDDEN = 37, 40, 12
NAMES = ("ppo dual, old", "ppo, kl k3, entropy", "gspo", "sequence rejection", "rapid")


def run(
    name: str, backend: str, mask_share: float = 0.6, group: dist.ProcessGroup | None = None
) -> tuple[FusedOutput, Tensor, Tensor]:
    """Output and gradients of 3 · loss; with a group, this rank's shard of the weight."""
    inputs = make_inputs(LENGTHS, mask_share=mask_share, drift=0.1, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    hidden_TD = torch.randn(sum(LENGTHS), HIDDEN, generator=generator).requires_grad_()
    weight_VD = 0.3 * torch.randn(PADDED, HIDDEN, generator=generator)
    targets_T = torch.randint(0, VOCAB, (sum(LENGTHS),), generator=generator)
    # Behaviour log-probs near the policy's own, so that ratios are not all clipped.
    with torch.no_grad():
        near_T = torch.log_softmax(hidden_TD @ weight_VD[:VOCAB].t(), -1)
        near_T = near_T.gather(1, targets_T[:, None])[:, 0]
        noise_T = 0.2 * torch.randn(sum(LENGTHS), generator=generator)
        inputs = dataclasses.replace(
            inputs, rollout_logprobs_T=near_T + noise_T, old_logprobs_T=near_T - noise_T
        )
    if group is not None:
        weight_VD = weight_VD.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
    weight_VD.requires_grad_()
    output = token_logprob_is_loss(
        hidden_TD,
        weight_VD,
        targets_T,
        inputs,
        CONFIGS[name],
        DENOMINATORS,
        with_entropy=True,
        vocab_size=VOCAB,
        tp_group=group,
        backend=backend,  # type: ignore[arg-type]
    )
    (3 * output.loss).backward()
    assert hidden_TD.grad is not None and weight_VD.grad is not None
    return output, hidden_TD.grad, weight_VD.grad


def assert_same(mine: tuple[FusedOutput, Tensor, Tensor], plain: tuple) -> None:
    close = {"rtol": 3e-5, "atol": 3e-6, "check_dtype": False}
    for ours, theirs in zip(mine[1:], plain[1:], strict=True):
        torch.testing.assert_close(ours, theirs, **close)
    torch.testing.assert_close(mine[0].loss, plain[0].loss, **close)
    torch.testing.assert_close(mine[0].logprobs_T, plain[0].logprobs_T, **close)
    torch.testing.assert_close(mine[0].entropy_T, plain[0].entropy_T, **close)
    ours, theirs = mine[0].metrics, plain[0].metrics
    # k3 of nearly equal log-probs cancels in the float32 reference.
    wide = {"rtol": 2e-4, "atol": 2e-5}
    torch.testing.assert_close(ours.sums_M, theirs.sums_M, **wide)
    torch.testing.assert_close(ours.lag_sums_LB, theirs.lag_sums_LB, **wide)
    torch.testing.assert_close(ours.maxima_E, theirs.maxima_E, **wide)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mask_share", [0.0, 0.6, 1.0])
def test_fused_equals_two_steps(name: str, mask_share: float) -> None:
    assert_same(run(name, "triton", mask_share), run(name, "chunked", mask_share))


def run_shards() -> list[tuple[FusedOutput, Tensor, Tensor]]:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]))
    results = [run(name, "triton", group=dist.group.WORLD) for name in NAMES]
    # A loss that is still part of a graph does not pickle.
    return [
        (dataclasses.replace(output, loss=output.loss.detach()), dhidden, dweight)
        for output, dhidden, dweight in results
    ]


def test_fused_on_two_shards() -> None:
    ranks = run_ranks(run_shards, 2, timeout_seconds=120)
    for index, name in enumerate(NAMES):
        whole = run(name, "chunked")
        first, second = ranks[0][index], ranks[1][index]
        joined = (first[0], first[1], torch.cat([first[2], second[2]]))
        assert_same(joined, whole)
        assert torch.equal(first[0].logprobs_T, second[0].logprobs_T)
