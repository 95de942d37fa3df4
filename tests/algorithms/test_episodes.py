"""Tests the advantages of episodes: a baseline counts each episode once, and the credit of a turn
is its return (the discounted sum of rewards from this turn on)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.algorithms.algorithm import Algorithm, build_algorithm
from megatron_async.algorithms.device_batch import DeviceBatch
from megatron_async.config import build_config
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.types import (
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
    Turn,
)

NO_PROMPT = Prompt(np.zeros(0, np.int32), "game")
ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "pg")


def segment(tokens: list[int], environment: bool) -> Segment:
    ids = np.array(tokens, np.int32)
    logprobs = np.zeros(len(ids)) if environment else -0.01 * (1 + ids)
    return Segment(ids, logprobs.astype(np.float32), PolicyVersion(0, 3), "e", environment)


def episode(
    number: int,
    group: int,
    rewards: list[float],
    scorer: float = 0.0,
    parents: list[int | None] | None = None,
    length: int = 2,
) -> Trajectory:
    """Return an episode whose turns have one environment token and `length` response tokens each.

    By default each turn follows the turn before it; `parents` names other parents.
    """
    chain = [None, *range(len(rewards) - 1)]
    segments = [
        author_segment
        for turn in range(len(rewards))
        for author_segment in (segment([turn], True), segment([50 + turn] * length, False))
    ]
    turns = [
        Turn(n, parent, 2 * n, end=FinishReason.STOP, reward=reward)
        for n, (parent, reward) in enumerate(zip(parents or chain, rewards, strict=True))
    ]
    return Trajectory(
        number,
        group,
        NO_PROMPT,
        TrajectoryState.SCORED,
        tuple(segments),
        FinishReason.STOP,
        reward=sum(rewards) + scorer,
        turns=tuple(turns),
    )


def algorithm(estimator: str) -> Algorithm:
    settings: dict[str, Any] = {"recipe": "copris", "advantage": {"estimator": estimator}}
    return build_algorithm(build_config({"algorithm": settings}))


def advantages(
    estimator: str, episodes: list[Trajectory], discount: float | None = None
) -> list[dict[int, float]]:
    """Return, for each episode, the advantage of the trained tokens of each turn; all tokens of a
    turn must have the same advantage."""
    groups = [
        Group(g, NO_PROMPT, tuple(t for t in episodes if t.group_id == g))
        for g in sorted({t.group_id for t in episodes})
    ]
    batch = pack_groups(groups, step=3, lineage=0, branch_points={}, discount=discount)
    prepared, _ = algorithm(estimator).prepare(DeviceBatch.of(batch))
    assert prepared.advantages_T is not None
    numbers_T = np.repeat(batch.trajectory_ids_S, batch.lengths_S())
    found = []
    for number in dict.fromkeys(batch.trajectory_ids_S.tolist()):
        mine_T = (numbers_T == number) & (batch.loss_mask_T > 0)
        by_turn: dict[int, set[float]] = {}
        for token, value in zip(
            batch.token_ids_T[mine_T], prepared.advantages_T[torch.tensor(mine_T)], strict=True
        ):
            by_turn.setdefault(int(token) - 50, set()).add(float(value))
        assert all(len(values) == 1 for values in by_turn.values())
        found.append({turn: values.pop() for turn, values in sorted(by_turn.items())})
    return found


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_advantages_do_not_change_when_a_history_is_copied_into_branches(estimator: str) -> None:
    """Compares three continuations of one response with three responses in a row."""
    others = [episode(1, 0, [0.0, 2.0]), episode(2, 0, [0.5]), episode(3, 1, [1.0, 0.0, 1.0])]
    line = episode(0, 0, [0.0, 0.0, 0.0, 1.0])
    fork = episode(0, 0, [0.0, 0.0, 0.0, 1.0], parents=[None, 0, 0, 0])
    assert len(line.branches()) == 1
    assert len(fork.branches()) == 3
    for discount in (None, 1.0, 0.9):
        expected = advantages(estimator, [line, *others], discount)
        assert advantages(estimator, [fork, *others], discount) == expected


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_turn_credit_equals_episode_credit_when_the_only_reward_is_at_the_end(
    estimator: str,
) -> None:
    """The reward comes from the environment or from a scorer."""
    episodes = [
        episode(0, 0, [0.0, 0.0, 1.0]),
        episode(1, 0, [0.0, 0.0], scorer=0.25),
        episode(2, 0, [0.0], scorer=2.0),
        episode(3, 1, [0.0, 0.0]),
        episode(4, 1, [0.0, 3.0]),
    ]
    assert advantages(estimator, episodes, 1.0) == advantages(estimator, episodes)


rewards = st.lists(st.integers(-4, 4).map(lambda r: r / 4), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ESTIMATORS),
    st.lists(st.lists(st.tuples(rewards, st.integers(0, 2)), min_size=2, max_size=4), min_size=1),
    st.sampled_from([1.0, 0.5]),
)
def test_turn_credit_equals_its_definition(
    estimator: str, shape: list[list[tuple[list[float], int]]], discount: float
) -> None:
    """In float64: G_t minus the mean of G_0, divided by the standard deviation of G_0 if the
    estimator divides."""
    episodes, number = [], 0
    for group, members in enumerate(shape):
        for turn_rewards, scorer in members:
            episodes.append(episode(number, group, turn_rewards, float(scorer)))
            number += 1
    returns = []
    for trajectory, (turn_rewards, scorer) in zip(
        episodes, (m for g in shape for m in g), strict=True
    ):
        values = [*turn_rewards[:-1], turn_rewards[-1] + scorer]
        returns.append(
            [
                sum(r * discount**later for later, r in enumerate(values[turn:]))
                for turn in range(len(trajectory.turns))
            ]
        )
    first = np.array([values[0] for values in returns])
    group_of = np.array([t.group_id for t in episodes])
    tokens = np.array([2.0 * len(values) for values in returns])
    for i, found in enumerate(advantages(estimator, episodes, discount)):
        mine = first[group_of == group_of[i]]
        mean, scale = mine.mean(), 1.0
        if estimator == "grpo":
            scale = mine.std(ddof=1) + 1e-6
        elif estimator == "rloo":
            mean = (mine.sum() - first[i]) / (len(mine) - 1)
        elif estimator == "pg":
            mean = first.mean()
        elif estimator == "reinforce_pp":
            mean = (first * tokens).sum() / tokens.sum()
            scale = np.sqrt(((first - mean) ** 2 * tokens).sum() / (tokens.sum() - 1) + 1e-8)
        expected = [(value - mean) / scale for value in returns[i]]
        np.testing.assert_allclose([found[t] for t in range(len(expected))], expected, atol=1e-6)


def test_minibatches_keep_the_branches_of_an_episode_together() -> None:
    fork = episode(0, 0, [0.0, 0.0, 1.0], parents=[None, 0, 0])
    episodes = [fork, episode(1, 0, [0.0]), episode(2, 1, [1.0]), episode(3, 1, [0.0])]
    groups = [Group(g, NO_PROMPT, tuple(t for t in episodes if t.group_id == g)) for g in (0, 1)]
    batch = DeviceBatch.of(pack_groups(groups, step=3, lineage=0, branch_points={}))
    first, second = batch.minibatches(2)
    assert first.trajectory_ids_S.tolist() == [0, 0, 1]
    assert [x.tolist() for x in first.episodes] == [[0, 2], [0, 0, 1]]
    assert second.trajectory_ids_S.tolist() == [2, 3]


def test_rapid_supports_turn_credit() -> None:
    """With all weights 1, the advantage is G_t minus the mean of G_0."""
    episodes = [episode(0, 0, [0.5, 0.0, 1.0]), episode(1, 0, [0.25], scorer=1.0)]
    groups = [Group(0, NO_PROMPT, tuple(episodes))]
    batch = pack_groups(groups, step=3, lineage=0, branch_points={}, discount=0.5)
    rapid = build_algorithm(build_config({"algorithm": {"recipe": "rapid"}}))
    prepared, _ = rapid.prepare(DeviceBatch.of(batch))
    prepared, _ = rapid.prepare_minibatch(prepared, prepared.rollout_logprobs_T)
    assert prepared.advantages_T is not None
    trained_T = prepared.advantages_T[prepared.loss_mask_T > 0]
    baseline = (0.75 + 1.25) / 2
    expected = np.repeat(np.array([0.75, 0.5, 1.0, 1.25]) - baseline, 2)
    np.testing.assert_allclose(trained_T.numpy(), expected, rtol=1e-6)


def test_reference_penalty_counts_each_trained_token_of_an_episode_once() -> None:
    fork = episode(0, 0, [0.0, 0.0, 1.0], parents=[None, 0, 0])
    episodes = [fork, episode(1, 0, [0.0])]
    batch = pack_groups([Group(0, NO_PROMPT, tuple(episodes))], step=3, lineage=0, branch_points={})
    device = DeviceBatch.of(batch)
    settings: dict[str, Any] = {"recipe": "copris", "kl": {"reward_coef": 0.5}}
    settings |= {"advantage": {"estimator": "dr_grpo"}}
    penalized = build_algorithm(build_config({"algorithm": settings}))
    reference_T = device.rollout_logprobs_T - 0.1 * device.loss_mask_T
    prepared, _ = penalized.prepare(dataclasses.replace(device, ref_logprobs_T=reference_T))
    assert prepared.advantages_T is not None
    shaped = np.array([1.0 - 0.5 * 0.1 * 6, 0.0 - 0.5 * 0.1 * 2])
    first_T = batch.cu_seqlens_S1[batch.first_E]
    expected = shaped - shaped.mean()
    np.testing.assert_allclose(prepared.advantages_T[torch.tensor(first_T)], expected, rtol=1e-5)
