"""Tests of branches, with random trees of turns."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

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

PROMPT = Prompt(np.array([1], np.int32), "game")
trees = st.lists(
    st.tuples(st.integers(-1, 30), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=9
)
"""For each turn: its parent, the number of environment tokens, and of policy segments.

A parent that does not come before its turn stands for None: the turn starts a conversation."""


def planted(tree: list[tuple[int, int, int]]) -> Trajectory:
    """Return a trajectory with these turns, in which every policy token has a different id."""
    segments: list[Segment] = []
    turns: list[Turn] = []
    made = 100
    for number, (parent, context, answered) in enumerate(tree):
        turns.append(Turn(number, parent if 0 <= parent < number else None, len(segments)))
        if context:
            ids = np.full(context, 2, np.int32)
            segments.append(
                Segment(
                    ids, np.zeros(context, np.float32), PolicyVersion(0, 0), from_environment=True
                )
            )
        for version in range(answered):
            ids = np.array([made], np.int32)
            segments.append(Segment(ids, -ids.astype(np.float32) / 1e3, PolicyVersion(0, version)))
            made += 1
    state, reason = TrajectoryState.SCORED, FinishReason.STOP
    return Trajectory(0, 0, PROMPT, state, tuple(segments), reason, reward=1.0, turns=tuple(turns))


@given(trees)
def test_policy_token_is_trained_once_and_in_its_first_branch(
    tree: list[tuple[int, int, int]],
) -> None:
    trajectory = planted(tree)
    own = [int(t) for s in trajectory.segments if not s.from_environment for t in s.token_ids]
    branches = trajectory.branches()
    trained = [int(t) for b in branches for t in b.token_ids[b.mask == 1]]
    assert sorted(trained) == own
    for branch in branches:
        policy = np.array([v is not None for v in branch.versions])
        assert (policy == (branch.token_ids >= 100)).all()
        expected = np.where(branch.mask, -branch.token_ids.astype(np.float32) / 1e3, 0)
        assert (branch.logprobs == expected.astype(np.float32)).all()
        assert branch.mask.any() or not own
    first = {int(t): n for n, b in reversed([*enumerate(branches)]) for t in b.token_ids}
    for number, branch in enumerate(branches):
        for token in branch.token_ids[branch.mask == 1]:
            assert first[int(token)] == number


@given(trees)
def test_batch_has_one_sequence_for_each_branch(tree: list[tuple[int, int, int]]) -> None:
    trajectory = planted(tree)
    branches = trajectory.branches()
    group = Group(0, PROMPT, (trajectory,))
    batch = pack_groups([group], step=3, lineage=0, branch_points={})
    assert batch.token_ids_T.tolist() == [t for b in branches for t in b.token_ids]
    assert batch.loss_mask_T.tolist() == [m for b in branches for m in b.mask]
    assert batch.rollout_logprobs_T.tolist() == [p for b in branches for p in b.logprobs]
    numbers = [-1 if v is None else v.number for b in branches for v in b.versions]
    assert batch.version_T.tolist() == numbers
    assert batch.lengths_S().tolist() == [len(b.token_ids) for b in branches]
    assert batch.first_E.tolist() == [0]


@given(trees)
def test_branch_is_a_path_of_turns_whose_parents_are_earlier(
    tree: list[tuple[int, int, int]],
) -> None:
    trajectory = planted(tree)
    for runs, branch in zip(trajectory.spans(), trajectory.branches(), strict=True):
        assert sum(len(run.segment) for run in runs) == len(branch.token_ids)
        path = list(dict.fromkeys(run.turn for run in runs if run.turn is not None))
        for before, after in itertools.pairwise(path):
            node: int | None = after
            # Turns without a segment are between the two nodes.
            while node is not None and node != before:
                node = trajectory.turns[node].parent
            assert node == before
