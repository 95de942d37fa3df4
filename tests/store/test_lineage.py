"""Tests which batches are consumed on each lineage of a run, and where lineages branch off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_async.store.lineage import Consumption, Lineage, LineageTree
from megatron_async.trajectory.types import PolicyVersion


def two_rollbacks() -> LineageTree:
    """Return a tree of lineages that are continued at different checkpoints.

    Lineage 0 reaches step 15. Lineages 1 and 3 continue its checkpoint 10, and lineage 2 continues
    lineage 1's checkpoint 20.
    """
    return LineageTree(
        [Lineage(0, None, 0), Lineage(1, 0, 10), Lineage(2, 1, 20), Lineage(3, 0, 10)]
    )


def test_branch_points_are_the_last_shared_policy_numbers() -> None:
    tree = two_rollbacks()
    assert tree.branch_points(2) == {0: 10, 1: 20, 3: 10}
    assert tree.branch_points(3) == {0: 10, 1: 10, 2: 10}
    tree.add(Lineage(4, 0, 5))
    assert tree.branch_points(4) == {0: 5, 1: 5, 2: 5, 3: 5}


def test_lineage_is_refused_without_a_larger_number_and_a_known_parent() -> None:
    tree = two_rollbacks()
    with pytest.raises(ValueError, match="lineage is 3, which is not larger than the newest, 3"):
        tree.add(Lineage(3, 0, 1))
    with pytest.raises(ValueError, match="lineage 8, which does not exist"):
        tree.add(Lineage(9, 8, 1))


@settings(max_examples=200)
@given(st.data())
def test_consumed_batches_equal_those_of_a_replayed_run(data: st.DataObject) -> None:
    """The reference is a simulation that stores the list of consumed batches in each checkpoint."""
    tree = LineageTree([Lineage(0, None, 0)])
    lineage, done = 0, [(0, s) for s in range(data.draw(st.integers(0, 4)))]
    checkpoints = {(0, n): done[:n] for n in range(len(done) + 1)}
    every = list(done)
    for new in range(1, data.draw(st.integers(1, 5)) + 1):
        lineage, number = data.draw(st.sampled_from(sorted(checkpoints)))
        done = list(checkpoints[lineage, number])
        tree.add(Lineage(new, lineage, number))
        for step in range(number, number + data.draw(st.integers(0, 4))):
            checkpoints[new, step] = list(done)
            done.append((new, step))
            every.append((new, step))
            checkpoints[new, step + 1] = list(done)
        here = Consumption.at(tree, new)
        assert [b for b in every if here.contains(*b)] == [b for b in every if b in done]
        lineage = new
    for (at, number), batches in checkpoints.items():
        consumption = Consumption.at_checkpoint(tree, PolicyVersion(at, number))
        assert {b for b in every if consumption.contains(*b)} == set(batches)
