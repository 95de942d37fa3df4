"""Tests advantages, reward shaping and the filter of groups against their formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron_async_kernels.loss_types import NonFiniteError

from megatron_async.algorithms import advantages
from tests.algorithms import oracle
from tests.algorithms.cases import assert_close

_SEQUENCE = st.tuples(
    st.integers(-8, 8).map(lambda n: n / 4),  # reward
    st.integers(0, 3),  # group
    st.integers(0, 4),  # trained tokens
    st.integers(-200, 200).map(lambda n: n / 8),  # log weight
)


@given(sequences=st.lists(_SEQUENCE, min_size=1, max_size=10), eta=st.sampled_from([2.0, 0.5]))
def test_advantage_estimators_equal_their_formulas(
    sequences: list[tuple[float, int, int, float]], eta: float
) -> None:
    rewards, groups, tokens, log_weights = map(list, zip(*sequences, strict=True))
    reward_S = torch.tensor(rewards, dtype=torch.float64)
    # Group numbers as in a batch: consecutive integers, in any order.
    group_S = torch.unique(torch.tensor(groups), return_inverse=True)[1]
    weight_S = torch.tensor(log_weights, dtype=torch.float64)
    results: dict[tuple[str, bool | None], torch.Tensor] = {
        ("grpo", None): advantages.group_advantages(reward_S, group_S)[0],
        ("dr_grpo", None): advantages.group_advantages(reward_S, group_S, normalize_std=False)[0],
        ("rloo", None): advantages.leave_one_out_advantages(reward_S, group_S),
        ("pg", None): advantages.batch_baseline_advantages(reward_S),
        ("reinforce_pp", None): advantages.whitened_advantages(reward_S, torch.tensor(tokens))[0],
    }
    for leave_one_out in (False, True):
        results["rapid", leave_one_out] = advantages.rapid_advantages(
            reward_S, weight_S, group_S, eta=eta, leave_one_out=leave_one_out
        )
    for (name, without_self), got in results.items():
        expected = oracle.advantages(
            name,
            rewards,
            groups,
            tokens=tokens,
            log_weights=log_weights,
            eta=eta,
            leave_one_out=without_self,
        )
        for a, b in zip(got.tolist(), expected, strict=True):
            assert_close(a, b, f"{name} {without_self}")


def test_overlong_penalty_is_linear_inside_the_buffer() -> None:
    length_S = torch.tensor([0, 60, 80, 90, 100, 140])
    got = advantages.overlong_penalty(length_S, max_length=100, buffer=20, penalty=2.0)
    assert got.tolist() == pytest.approx([0.0, 0.0, 0.0, -1.0, -2.0, -2.0])


def test_advantages_are_empty_when_the_batch_is_empty() -> None:
    nothing, no_group = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    assert advantages.group_advantages(nothing, no_group)[0].numel() == 0
    assert advantages.batch_baseline_advantages(nothing).numel() == 0
    assert advantages.informative_groups(nothing, no_group).numel() == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_group_advantages_name_rewards_that_are_not_finite(value: float) -> None:
    with pytest.raises(NonFiniteError, match=r"^rewards"):
        advantages.group_advantages(torch.tensor([0.0, value]), torch.tensor([0, 0]))
