"""Tests of `pack_groups`, with hand-written and random groups, and of lag in samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.algorithms.device_batch import DeviceBatch
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.packing import number_on_lineage, pack_groups
from megatron_async.trajectory.sample_lag import SamplesTrained
from megatron_async.trajectory.types import (
    DropReason,
    FinishReason,
    Group,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
)


def segment(
    tokens: list[int], version: tuple[int, int], *, environment: bool = False, engine: str = "e0"
) -> Segment:
    logprobs = [0.0 if environment else -0.1 * token for token in tokens]
    return Segment(
        np.array(tokens, np.int32),
        np.array(logprobs, np.float32),
        PolicyVersion(*version),
        engine,
        environment,
    )


def scored(trajectory_id: int, group_id: int, prompt: Prompt, *segments: Segment) -> Trajectory:
    return Trajectory(
        trajectory_id,
        group_id,
        prompt,
        TrajectoryState.SCORED,
        segments,
        FinishReason.STOP,
        reward=100.0 - trajectory_id,  # Rewards have another order than the IDs.
    )


PROMPT = Prompt(np.array([1, 2], np.int32), "task")


def group(*trajectories: Trajectory) -> Group:
    return Group(trajectories[0].group_id, PROMPT, trajectories)


def routed(part: Segment, kind: str = "<i2") -> Segment:
    """Return the segment with a further column that repeats its tokens."""
    column = np.zeros(len(part), [("routes", kind, (2, 4))])
    column["routes"] = part.token_ids[:, None, None]
    return dataclasses.replace(part, columns=(column,))


def test_further_column_is_packed_with_its_tokens_and_0_elsewhere() -> None:
    without = segment([6, 7], (0, 1))
    g = group(
        scored(10, 5, PROMPT, routed(segment([3, 4], (0, 1))), without),
        scored(11, 5, PROMPT, routed(segment([8], (0, 1)))),
    )
    batch = pack_groups([g], step=1, lineage=0, branch_points={})
    assert batch.columns["routes"].shape == (9, 2, 4)
    assert batch.columns["routes"].dtype == np.int16
    assert batch.columns["routes"][:, 1, 3].tolist() == [0, 0, 3, 4, 0, 0, 0, 0, 8]
    part = DeviceBatch.of(batch).select(torch.tensor([1]))
    assert part.columns["routes"][:, 0, 0].tolist() == [0, 0, 8]
    assert (
        pack_groups(
            [group(scored(10, 5, PROMPT, without))], step=1, lineage=0, branch_points={}
        ).columns
        == {}
    )


def test_pack_groups_refuses_columns_of_one_name_and_two_types() -> None:
    g = group(
        scored(10, 5, PROMPT, routed(segment([3], (0, 1)))),
        scored(11, 5, PROMPT, routed(segment([8], (0, 1)), "<i4")),
    )
    with pytest.raises(TypeError, match="Cannot cast"):
        pack_groups([g], step=1, lineage=0, branch_points={})


def test_batch_fields_of_prompt_policy_and_environment_tokens() -> None:
    long = scored(11, 5, PROMPT, segment([6], (0, 2)), segment([7], (0, 3)))
    g = group(
        scored(10, 5, PROMPT, segment([3, 4], (0, 1)), segment([9], (0, 1), environment=True)),
        dataclasses.replace(long, finish_reason=FinishReason.LENGTH),
    )
    batch = pack_groups([g], step=3, lineage=0, branch_points={}, temperature=0.7)

    assert batch.cu_seqlens_S1.tolist() == [0, 5, 9]
    assert batch.token_ids_T.tolist() == [1, 2, 3, 4, 9, 1, 2, 6, 7]
    assert batch.loss_mask_T.tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert batch.version_T.tolist() == [-1, -1, 1, 1, -1, -1, -1, 2, 3]
    assert batch.lag_T.tolist() == [0, 0, 2, 2, 0, 0, 0, 1, 0]
    expected = [0, 0, -0.3, -0.4, 0, 0, 0, -0.6, -0.7]
    np.testing.assert_allclose(batch.rollout_logprobs_T, np.array(expected, np.float32))
    assert batch.rewards_S.tolist() == [90.0, 89.0]
    assert batch.trajectory_ids_S.tolist() == [10, 11]
    assert batch.group_ids_S.tolist() == [5, 5]
    assert batch.prompt_lengths_S.tolist() == [2, 2]
    assert batch.resumed_S.tolist() == [False, True]
    assert batch.truncated_S.tolist() == [False, True]
    assert batch.temperature == 0.7


def test_lag_of_abandoned_lineage_counts_from_its_branch_point() -> None:
    g = group(
        scored(1, 1, PROMPT, segment([3], (0, 2)), segment([4], (0, 9)), segment([5], (1, 6)))
    )
    batch = pack_groups([g], step=8, lineage=1, branch_points={0: 5})
    assert batch.version_T.tolist() == [-1, -1, 2, 5, 6]
    assert batch.lag_T.tolist() == [0, 0, 6, 3, 2]


def test_pack_groups_leaves_out_dropped_trajectories() -> None:
    gone = dataclasses.replace(
        scored(2, 1, PROMPT), state=TrajectoryState.DROPPED, drop_reason=DropReason.SCORER
    )
    batch = pack_groups(
        [group(scored(1, 1, PROMPT, segment([3], (0, 0))), gone)],
        step=0,
        lineage=0,
        branch_points={},
    )
    assert batch.trajectory_ids_S.tolist() == [1]


def test_pack_groups_names_trajectory_that_cannot_be_trained_on() -> None:
    good = scored(1, 1, PROMPT, segment([3], (0, 4)))
    no_reward = dataclasses.replace(good, reward=None, state=TrajectoryState.FINISHED)
    with pytest.raises(ValueError, match="trajectory 1 is finished and has no reward"):
        pack_groups([group(no_reward)], step=4, lineage=0, branch_points={})
    with pytest.raises(ValueError, match="policy number 4"):
        pack_groups([group(good)], step=3, lineage=0, branch_points={})
    with pytest.raises(ValueError, match="lineage 0"):
        pack_groups([group(good)], step=4, lineage=1, branch_points={})
    empty = Prompt(np.empty(0, np.int32), "task")
    with pytest.raises(ValueError, match="does not begin with a prompt or environment token"):
        pack_groups(
            [group(scored(1, 1, empty, segment([3], (0, 0))))],
            step=0,
            lineage=0,
            branch_points={},
        )


segments = st.builds(
    segment,
    st.lists(st.integers(1, 50), min_size=1, max_size=6),
    st.tuples(st.integers(0, 2), st.integers(0, 12)),
    environment=st.booleans(),
)


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.lists(segments, max_size=4), min_size=1, max_size=3), max_size=4),
    st.integers(12, 20),
    st.one_of(st.none(), st.integers(0, 12)),
)
def test_pack_groups_equals_a_plain_loop(
    shape: list[list[list[Segment]]], step: int, mask_before: int | None
) -> None:
    branch_points = {0: 4, 1: 8}
    groups = []
    for group_id, members in enumerate(shape):
        groups.append(
            group(
                *(
                    scored(group_id * 10 + i, group_id, PROMPT, *parts)
                    for i, parts in enumerate(members)
                )
            )
        )
    batch = pack_groups(
        groups,
        step=step,
        lineage=2,
        branch_points=branch_points,
        mask_before=mask_before,
    )

    rows: list[tuple[int, float, float, int, int]] = []
    for g in groups:
        for trajectory in g.trajectories:
            rows += [(int(token), 0.0, 0.0, -1, 0) for token in PROMPT.token_ids]
            for part in trajectory.segments:
                for token, logprob in zip(part.token_ids, part.logprobs, strict=True):
                    if part.from_environment:
                        rows.append((int(token), 0.0, 0.0, -1, 0))
                        continue
                    number = number_on_lineage(part.version, 2, branch_points)
                    lag = step - number
                    stale = mask_before is not None and number < mask_before
                    rows.append(
                        (int(token), 0.0, 0.0, number, 0)
                        if stale
                        else (int(token), 1.0, float(logprob), number, lag)
                    )
    got = zip(
        batch.token_ids_T.tolist(),
        batch.loss_mask_T.tolist(),
        batch.rollout_logprobs_T.tolist(),
        batch.version_T.tolist(),
        batch.lag_T.tolist(),
        strict=True,
    )
    assert list(got) == rows
    each = [(t.trajectory_id, t.group_id, t.reward) for g in groups for t in g.trajectories]
    ids = zip(batch.trajectory_ids_S, batch.group_ids_S, batch.rewards_S, strict=True)
    assert list(ids) == each
    assert int(batch.cu_seqlens_S1[-1]) == len(rows)


def test_resumed_is_true_for_two_requests_but_not_for_two_turns() -> None:
    one, env = segment([3], (0, 0)), segment([9], (0, 0), environment=True)
    assert not scored(1, 1, PROMPT, one, env, one).resumed
    assert scored(1, 1, PROMPT, one, one).resumed
    assert scored(1, 1, PROMPT, one, env, segment([3], (0, 1))).resumed
    assert not scored(1, 1, PROMPT, one).resumed


def batch_of(step: int, *versions: list[str], mask_before: int | None = None) -> TokenBatch:
    """Return a batch of lineage 2 with one trajectory per list: two tokens for each version in it.

    Lineage 1 parted from lineage 2 at step 3.
    """
    prompt = Prompt(np.array([5, 6], np.int32), "t")
    trajectories = tuple(
        Trajectory(
            i,
            0,
            prompt,
            TrajectoryState.SCORED,
            tuple(
                Segment(np.ones(2, np.int32), -np.ones(2, np.float32), PolicyVersion.parse(version))
                for version in of_one
            ),
            reward=1.0,
        )
        for i, of_one in enumerate(versions)
    )
    return pack_groups(
        [Group(0, prompt, trajectories)],
        step=step,
        lineage=2,
        branch_points={1: 3},
        mask_before=mask_before,
    )


def trained(*sizes: int) -> SamplesTrained:
    counts = SamplesTrained()
    for size in sizes:
        counts.add(size)
    return counts


def test_sample_lag_counts_batches_since_the_oldest_version() -> None:
    counts = trained(32, 32, 8, 32, 32)
    on_policy, older, resumed = ["2.5"], ["2.4"], ["2.2", "2.4", "2.5"]
    assert counts.lag_E(batch_of(5, on_policy, older, resumed)).tolist() == [0, 32, 8 + 32 + 32]


def test_sample_lag_of_abandoned_lineage_counts_from_its_branch_point() -> None:
    """Version 9 of lineage 1 counts as version 3, the checkpoint at which the lineages part."""
    counts = trained(*[10] * 5)
    assert counts.lag_E(batch_of(5, ["1.9"], ["1.1"])).tolist() == [20, 40]


def test_sample_lag_ignores_tokens_that_are_not_trained() -> None:
    counts = trained(*[10] * 5)
    batch = batch_of(5, ["2.0", "2.4"], ["2.0"], mask_before=3)
    assert counts.lag_E(batch).tolist() == [10], "the second one has no trained token at all"


def test_sample_lag_is_empty_for_a_batch_without_sequences() -> None:
    assert trained(10).lag_E(batch_of(1)).tolist() == []


def test_sample_lag_uses_batch_sizes_of_the_store_after_a_resume() -> None:
    """Batch 0 was compacted, the trainer could not train batch 1, and batch 2 was small."""
    counts = SamplesTrained(4, 32, {1: 0, 2: 8, 3: 32, 4: 99})
    assert [counts.between(version, 4) for version in range(5)] == [72, 40, 40, 32, 0]


def test_sample_lag_counts_dropped_batch_as_empty() -> None:
    counts = trained(10, 20, 30)
    counts.drop(1)
    assert [counts.between(0, step) for step in range(4)] == [0, 10, 10, 40]
