"""Tests of the chunked torch version of `token_logprob` against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron_async_kernels import (
    describe_backend,
    reference_token_logprob,
    resolve_backend,
    token_logprob,
)
from torch import Tensor


def make(
    tokens: int, vocab: int, hidden: int, *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    """Return random hidden states [T, D], weight [V, D] and targets [T]."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight_VD = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    targets_T = torch.randint(0, vocab, (tokens,), generator=generator)
    return hidden_TD.to(dtype), weight_VD.to(dtype), targets_T


def gradients(
    outputs: tuple[Tensor, Tensor], inputs: list[Tensor], seed: int = 1
) -> list[Tensor | None]:
    """Return the gradients of random projections of (log-probs, entropy) with respect to
    `inputs`."""
    generator = torch.Generator().manual_seed(seed)
    loss = outputs[0].new_zeros(())
    for output in outputs:
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        loss = loss + (output * weights.to(output.dtype)).sum()
    return list(torch.autograd.grad(loss, inputs, allow_unused=True))


@settings(max_examples=40)
@given(
    tokens=st.integers(0, 17),
    vocab=st.integers(1, 70),
    hidden=st.integers(1, 20),
    padding=st.integers(0, 5),
    temperature=st.floats(0.1, 10.0),
    mask_share=st.sampled_from([0.0, 0.5, 1.0, None]),
    chunk_tokens=st.sampled_from([1, 3, 8, None]),
    seed=st.integers(0, 1000),
)
def test_chunked_token_logprob_matches_the_reference(
    tokens: int,
    vocab: int,
    hidden: int,
    padding: int,
    temperature: float,
    mask_share: float | None,
    chunk_tokens: int | None,
    seed: int,
) -> None:
    hidden_TD, weight_VD, targets_T = make(tokens, vocab + padding, hidden, seed=seed)
    targets_T = targets_T % vocab
    mask_T = None
    if mask_share is not None:
        mask_T = torch.rand(tokens, generator=torch.Generator().manual_seed(seed)) < mask_share
        targets_T = torch.where(mask_T, targets_T, -100)
    inputs = [hidden_TD.requires_grad_(), weight_VD.requires_grad_()]
    expected = reference_token_logprob(
        hidden_TD,
        weight_VD,
        targets_T,
        token_mask_T=mask_T,
        temperature=temperature,
        vocab_size=vocab,
    )
    actual = token_logprob(
        hidden_TD,
        weight_VD,
        targets_T,
        token_mask=mask_T,
        return_entropy=True,
        backend="chunked",
        chunk_tokens=chunk_tokens,
        workspace_bytes=4096 + 48 * hidden * (chunk_tokens or tokens + 1),
        temperature=temperature,
        vocab_size=vocab,
    )
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-10)
    for mine, theirs in zip(gradients(actual, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


def test_chunked_float32_log_probs_are_within_1e_5_of_exact() -> None:
    """A model's head: logits of a few units, a peaked distribution, 32,000 words."""
    hidden_TD, weight_VD, targets_T = make(64, 32_000, 128, seed=4)
    hidden_TD = hidden_TD / 4
    exact_T, entropy_T = reference_token_logprob(hidden_TD, weight_VD, targets_T)
    mine = token_logprob(
        hidden_TD.float(),
        weight_VD.float(),
        targets_T,
        return_entropy=True,
        backend="chunked",
        chunk_tokens=32,
    )
    # The inputs' own rounding to float32 is not the kernel's error.
    rounded_T, rounded_entropy_T = reference_token_logprob(
        hidden_TD.float().double(), weight_VD.float().double(), targets_T
    )
    assert float((mine[0] - rounded_T).abs().max()) < 1e-5
    assert float((mine[1] - rounded_entropy_T).abs().max()) < 1e-5
    assert float((exact_T - rounded_T).abs().max()) < 1e-5
    assert float(entropy_T.min()) > 0


def test_token_logprob_adds_to_main_gradient_and_sets_megatrons_mark() -> None:
    hidden_TD, weight_VD, targets_T = make(12, 30, 8)
    plain_VD = weight_VD.clone().requires_grad_()
    token_logprob(hidden_TD, plain_VD, targets_T, backend="chunked").sum().backward()  # type: ignore[union-attr]
    assert plain_VD.grad is not None

    main_grad_VD = torch.ones_like(weight_VD)
    parameter = torch.nn.Parameter(weight_VD.clone())
    for expected_grad, marked in ((None, False), (0.0, True)):
        if marked:
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]
        logprobs_T = token_logprob(
            hidden_TD, parameter, targets_T, weight_grad_out=main_grad_VD, backend="chunked"
        )
        assert isinstance(logprobs_T, Tensor)
        logprobs_T.sum().backward()
        if expected_grad is None:
            assert parameter.grad is None
        else:
            assert parameter.grad is not None and not parameter.grad.any()
            assert parameter.grad_added_to_main_grad  # type: ignore[attr-defined]
    torch.testing.assert_close(main_grad_VD, 1 + 2 * plain_VD.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"vocab_size": 31}, "vocab_size must be within 1..30"),
        ({"targets": torch.full((12,), 30)}, r"targets must lie in 0..29, found 30..30"),
        ({"weight": torch.zeros(30, 7, dtype=torch.float64)}, "must share D"),
        ({"weight": torch.zeros(30, 8)}, "must share a float dtype"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"backend": "triton"}, "fp32, fp16 or bf16|needs CUDA tensors"),
        ({"weight_grad_out": torch.zeros(30, 8)}, "weight_grad_out must be torch.float64"),
        ({"workspace_bytes": 8}, "workspace_bytes=8 is too small"),
    ],
)
def test_token_logprob_names_an_invalid_argument(change: dict[str, object], message: str) -> None:
    hidden_TD, weight_VD, targets_T = make(12, 30, 8)
    arguments = {"hidden": hidden_TD, "weight": weight_VD, "targets": targets_T, **change}
    with pytest.raises(ValueError, match=message):
        token_logprob(**arguments)  # type: ignore[arg-type]


def test_resolve_backend_chooses_by_device_and_dtype() -> None:
    assert resolve_backend("auto", torch.device("cpu"), torch.float32) == "chunked"
    assert resolve_backend("auto", torch.device("cuda"), torch.bfloat16) == "triton"
    assert resolve_backend("auto", torch.device("cuda"), torch.float64) == "chunked"
    assert describe_backend()
