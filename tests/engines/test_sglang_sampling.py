"""Sampling by the cumulative sum: the chances are those of the distribution."""

import pytest
import torch
from torch import Tensor

from megatron_async.engines.sglang.sampling import from_cumulative


def never(*_: Tensor | None) -> Tensor:
    raise AssertionError("SGLang's own sampling was asked")


def test_each_token_is_drawn_with_its_probability() -> None:
    torch.manual_seed(0)
    draws = 200_000
    probs_V = torch.softmax(torch.randn(50) * 2, -1)
    ids_S = from_cumulative(never, probs_V.expand(draws, -1))
    assert ids_S.dtype == torch.int32
    assert ids_S.shape == (draws,)
    counts_V = torch.bincount(ids_S, minlength=50)
    chi_square = ((counts_V - draws * probs_V) ** 2 / (draws * probs_V)).sum()
    assert chi_square < 85  # 49 degrees of freedom: p = 0.001


def test_each_row_has_a_distribution_of_its_own() -> None:
    ids_S = from_cumulative(never, torch.eye(7)[[3, 0, 6, 5]])
    assert ids_S.tolist() == [3, 0, 6, 5]


def test_a_row_need_not_sum_to_one() -> None:
    torch.manual_seed(0)
    ids_S = from_cumulative(never, torch.tensor([0.01, 0.03]).expand(40_000, -1))
    assert ids_S.float().mean().item() == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("drawn", [0.0, 0.5, 1 - 2**-24])
def test_a_token_without_probability_is_never_drawn(
    monkeypatch: pytest.MonkeyPatch, drawn: float
) -> None:
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.full_like(like, drawn))
    torch.manual_seed(1)
    probs_SV = torch.rand(512, 96)
    probs_SV[:, :3] = probs_SV[:, -5:] = probs_SV[:, 40:60] = 0
    probs_SV /= probs_SV.sum(-1, keepdim=True) * torch.linspace(0.5, 2, 512)[:, None]
    ids_S = from_cumulative(never, probs_SV)
    assert (probs_SV[torch.arange(512), ids_S.long()] > 0).all()


def test_a_row_of_nan_gets_an_id_of_the_vocabulary() -> None:
    assert 0 <= from_cumulative(never, torch.full((1, 9), torch.nan)).item() < 9


def test_a_request_with_its_own_seed_is_sampled_by_sglang() -> None:
    seed_S, positions_S, wanted_S = torch.tensor([7]), torch.tensor([3]), torch.tensor([4])

    def original(probs: Tensor, seed: Tensor | None, positions: Tensor | None) -> Tensor:
        assert seed is seed_S
        assert positions is positions_S
        return wanted_S

    assert from_cumulative(original, torch.ones(1, 5), seed_S, positions_S) is wanted_S
