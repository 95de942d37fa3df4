"""Tests that the vocabulary shards of 1 to 4 ranks give the log-probs and gradients of the unsplit
head."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from megatron_async_kernels import reference_token_logprob, token_logprob
from torch import Tensor

from tests.distributed import run_ranks

TOKENS, HIDDEN, VOCAB, PADDED = 12, 6, 21, 24


@dataclass(frozen=True)
class Case:
    sequence_parallel: bool
    mask_share: float
    main_grad: bool
    vocab: int = VOCAB


CASES = (
    Case(sequence_parallel=False, mask_share=1.0, main_grad=False),
    Case(sequence_parallel=True, mask_share=0.5, main_grad=False),
    Case(sequence_parallel=True, mask_share=1.0, main_grad=True),
    Case(sequence_parallel=False, mask_share=0.0, main_grad=True),
    # The vocabulary is so small that the last shards have only padding.
    Case(sequence_parallel=True, mask_share=0.7, main_grad=False, vocab=5),
)


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return hidden states, weight, targets, mask, and the weights of (log-prob, entropy) in the
    loss."""
    generator = torch.Generator().manual_seed(7)
    hidden_TD = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight_VD = 3 * torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(0, case.vocab, (TOKENS,), generator=generator)
    mask_T = torch.rand(TOKENS, generator=generator) < case.mask_share
    loss_2T = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    return hidden_TD, weight_VD, targets_T, mask_T, loss_2T


def run_case(case: Case) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return this rank's log-probs, dHidden, dWeight and main gradient."""
    group = dist.group.WORLD
    rank, size = dist.get_rank(), dist.get_world_size()
    hidden_TD, weight_VD, targets_T, mask_T, loss_2T = tensors(case)
    if case.sequence_parallel:
        hidden_TD = hidden_TD.chunk(size)[rank].clone()
    hidden_TD.requires_grad_()
    weight = weight_VD.chunk(size)[rank].clone().requires_grad_()
    main_grad = torch.ones_like(weight) if case.main_grad else None
    logprobs_T, entropy_T = token_logprob(
        hidden_TD,
        weight,
        targets_T,
        temperature=0.7,
        return_entropy=True,
        token_mask=mask_T,
        tp_group=group,
        sequence_parallel=case.sequence_parallel,
        weight_grad_out=main_grad,
        vocab_size=case.vocab,
        chunk_tokens=5,
    )
    (loss_2T[0] @ logprobs_T + loss_2T[1] @ entropy_T).backward()
    assert hidden_TD.grad is not None
    return logprobs_T.detach(), hidden_TD.grad, weight.grad, main_grad


def run_all_cases() -> list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]:
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]))
    return [run_case(case) for case in CASES]


def join(pieces: Iterator[Tensor | None]) -> Tensor:
    return torch.cat([piece for piece in pieces if piece is not None])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_vocabulary_shards_match_the_unsplit_head(size: int) -> None:
    by_rank = run_ranks(run_all_cases, size, timeout_seconds=90)
    for index, case in enumerate(CASES):
        hidden_TD, weight_VD, targets_T, mask_T, loss_2T = tensors(case)
        inputs = [tensor.requires_grad_() for tensor in (hidden_TD, weight_VD)]
        logprobs_T, entropy_T = reference_token_logprob(
            hidden_TD,
            weight_VD,
            targets_T,
            temperature=0.7,
            token_mask_T=mask_T,
            vocab_size=case.vocab,
        )
        (loss_2T[0] @ logprobs_T + loss_2T[1] @ entropy_T).backward()
        ranks = [results[index] for results in by_rank]
        for rank in ranks:
            torch.testing.assert_close(rank[0], logprobs_T.detach())
            if not case.sequence_parallel:
                torch.testing.assert_close(rank[1], inputs[0].grad)
        if case.sequence_parallel:
            torch.testing.assert_close(join(rank[1] for rank in ranks), inputs[0].grad)
        if case.main_grad:
            assert all(rank[2] is None for rank in ranks)
            torch.testing.assert_close(join(rank[3] for rank in ranks), 1 + inputs[1].grad)
        else:
            torch.testing.assert_close(join(rank[2] for rank in ranks), inputs[1].grad)
