"""Tests `in_two_draws`: tokens are sampled with the probabilities of the distribution."""

import pytest
import torch
from torch import Tensor

from megatron_async.engines.sglang.sampling import in_two_draws


def must_not_be_called(*_: Tensor | None) -> Tensor:
    raise AssertionError("SGLang's own sampler was called")


def test_in_two_draws_draws_each_token_with_its_probability() -> None:
    torch.manual_seed(0)
    draws = 200_000
    probs_V = torch.softmax(torch.randn(50) * 2, -1)
    ids_S = in_two_draws(must_not_be_called, probs_V.expand(draws, -1))
    assert ids_S.dtype == torch.int32
    assert ids_S.shape == (draws,)
    counts_V = torch.bincount(ids_S, minlength=50)
    chi_square = ((counts_V - draws * probs_V) ** 2 / (draws * probs_V)).sum()
    assert chi_square < 85  # The probability of more is 0.001 for 49 degrees of freedom.


def test_in_two_draws_uses_a_separate_distribution_per_row() -> None:
    ids_S = in_two_draws(must_not_be_called, torch.eye(7)[[3, 0, 6, 5]])
    assert ids_S.tolist() == [3, 0, 6, 5]


def test_in_two_draws_accepts_rows_that_do_not_sum_to_one() -> None:
    torch.manual_seed(0)
    ids_S = in_two_draws(must_not_be_called, torch.tensor([0.01, 0.03]).expand(40_000, -1))
    assert ids_S.float().mean().item() == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1 - 2**-53])
def test_in_two_draws_never_draws_a_token_of_probability_zero(
    monkeypatch: pytest.MonkeyPatch, drawn: float
) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, drawn))
    torch.manual_seed(1)
    probs_SV = torch.rand(512, 900)
    probs_SV[:, :3] = probs_SV[:, -140:] = probs_SV[:, 40:700] = 0
    probs_SV /= probs_SV.sum(-1, keepdim=True) * torch.linspace(0.5, 2, 512)[:, None]
    ids_S = in_two_draws(must_not_be_called, probs_SV)
    assert (probs_SV[torch.arange(512), ids_S.long()] > 0).all()


def test_in_two_draws_draws_rare_tokens_of_a_large_vocabulary_often_enough() -> None:
    """Their probabilities are below the resolution of a sum in float32."""
    torch.manual_seed(0)
    probs_V = torch.full((150_000,), 1e-8)
    probs_V[70_000] = 1 - 0.0015
    few_V = probs_V.clone()
    few_V[70_000] = 0.0  # Otherwise nearly every draw would be token 70,000.
    few_V[:1000] = 2e-8
    ids_S = torch.cat([in_two_draws(must_not_be_called, few_V.expand(500, -1)) for _ in range(40)])
    assert (ids_S < 1000).float().mean().item() == pytest.approx(2 / 151, abs=0.003)
    assert len(ids_S.unique()) > 17_000  # There are 20,000 draws from 150,000 tokens.
    assert (
        in_two_draws(must_not_be_called, probs_V.expand(500, -1)) == 70_000
    ).float().mean() > 0.98


def test_in_two_draws_returns_a_valid_id_when_a_row_is_nan_or_zero() -> None:
    for value in (torch.nan, 0.0):
        assert 0 <= in_two_draws(must_not_be_called, torch.full((1, 9), value)).item() < 9


def test_in_two_draws_calls_sglangs_sampler_when_a_seed_is_set() -> None:
    seed_S, positions_S, wanted_S = torch.tensor([7]), torch.tensor([3]), torch.tensor([4])

    def original(probs: Tensor, seed: Tensor | None, positions: Tensor | None) -> Tensor:
        assert seed is seed_S
        assert positions is positions_S
        return wanted_S

    assert in_two_draws(original, torch.ones(1, 5), seed_S, positions_S) is wanted_S
