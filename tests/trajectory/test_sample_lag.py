"""Lag in samples: trajectories trained between the oldest token's version and the batch."""

from __future__ import annotations

import numpy as np

from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.packing import pack_groups
from megatron_async.trajectory.sample_lag import SamplesTrained
from megatron_async.trajectory.types import (
    Group,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
)


def batch_of(step: int, *versions: list[str], mask_before: int | None = None) -> TokenBatch:
    """One trajectory for each list, with two tokens by each of its versions, on lineage 2.

    Lineage 1 parted from it at step 3.
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


def test_it_counts_the_batches_from_the_oldest_version_on() -> None:
    counts = trained(32, 32, 8, 32, 32)
    on_policy, older, resumed = ["2.5"], ["2.4"], ["2.2", "2.4", "2.5"]
    assert counts.lag_E(batch_of(5, on_policy, older, resumed)).tolist() == [0, 32, 8 + 32 + 32]


def test_a_token_of_an_abandoned_line_counts_from_where_the_lineages_part() -> None:
    """Version 9 of lineage 1 was never trained on this one: it is as old as the checkpoint, 3."""
    counts = trained(*[10] * 5)
    assert counts.lag_E(batch_of(5, ["1.9"], ["1.1"])).tolist() == [20, 40]


def test_tokens_that_are_not_trained_do_not_count() -> None:
    counts = trained(*[10] * 5)
    batch = batch_of(5, ["2.0", "2.4"], ["2.0"], mask_before=3)
    assert counts.lag_E(batch).tolist() == [10], "the second one has no trained token at all"


def test_a_batch_without_sequences_has_no_lag() -> None:
    assert trained(10).lag_E(batch_of(1)).tolist() == []


def test_after_a_resume_it_goes_on_from_what_the_store_holds() -> None:
    """Batch 0 was compacted, the trainer could not use batch 1, batch 2 was a small one."""
    counts = SamplesTrained(4, 32, {1: 0, 2: 8, 3: 32, 4: 99})
    assert [counts.between(version, 4) for version in range(5)] == [72, 40, 40, 32, 0]


def test_a_dropped_batch_has_trained_nothing() -> None:
    counts = trained(10, 20, 30)
    counts.drop(1)
    assert [counts.between(0, step) for step in range(4)] == [0, 10, 10, 40]
