"""Packs complete groups into one `TokenBatch`, with the version, lag and loss mask of every token.

Invariants
- Every policy token gets a policy number on the current lineage. A token of version (l, a) has
  number a if l is the current lineage. If l is another lineage, which has the same weights as the
  current lineage up to policy number n0, the token has number min(a, n0). The lag of a token with
  number m in update n is n - m, which is at least 0 (docs/semantics.md section 1).
- A token is trained (mask 1) if the policy generated it, its turn is not abandoned and no staleness
  rule masks it. A token that is in several sequences is trained in one of them. All other tokens
  have mask 0, log-prob 0 and lag 0. In `version_T`, a policy token that is not trained keeps its
  number; prompt and environment tokens have -1.
- Groups stay in the given order. The trajectories of a group are adjacent, and so are the branches
  of a trajectory. Dropped trajectories of a group are left out. Every other trajectory needs a
  reward.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.columns import NO_TOKENS, Array, joined
from megatron_async.trajectory.types import (
    BranchSpan,
    FinishReason,
    Group,
    IntArray,
    PolicyVersion,
    Segment,
    Trajectory,
    TrajectoryState,
)

NO_VERSION = -1
TURN_RETURNS = "turn_returns"
"""Name of the column with the return of each trained token, which is the discounted sum of the
rewards from the token's turn on."""


def pack_groups(
    groups: Sequence[Group],
    *,
    step: int,
    lineage: int,
    branch_points: Mapping[int, int],
    temperature: float = 1.0,
    mask_before: int | None = None,
    discount: float | None = None,
) -> TokenBatch:
    """Pack complete and scored groups into the batch of update `step` on lineage `lineage`.

    Args:
        groups: The groups, in the order of the batch.
        step: Number of the update that will train the batch.
        lineage: The current lineage.
        branch_points: For every earlier lineage, the last policy number that it shares with the
            current lineage.
        temperature: Sampling temperature of the log-probs.
        mask_before: Tokens of a policy number below this one are not trained; None trains all.
        discount: Discount per turn. If set and a trajectory has turns, the batch gets the column
            `TURN_RETURNS`, and the reward of an episode is the return of its first turn.

    Raises:
        ValueError: If a trajectory cannot be trained on: it has no reward, a sequence does not
            begin with a prompt or environment token, a lineage is unknown, or tokens are of a newer
            policy than `step`. The message names the trajectory or the version.
    """
    chosen = [
        (trajectory, runs)
        for group in groups
        for trajectory in group.trajectories
        if trajectory.state is not TrajectoryState.DROPPED
        for runs in _trainable(trajectory)
    ]
    sequences = [trajectory for trajectory, _ in chosen]
    every = [run for _, runs in chosen for run in runs]
    segments = [run.segment for run in every]
    version_R = _numbers(segments, step, lineage, branch_points)
    length_R = np.array([len(segment) for segment in segments], dtype=np.int64)
    version_T: IntArray = np.repeat(version_R, length_R)

    own_T = np.repeat(np.array([run.trained for run in every], dtype=bool), length_R)
    trained_T = own_T.copy()
    if mask_before is not None:
        trained_T &= version_T >= mask_before

    rewards, columns = [t.reward for t in sequences], _columns(segments)
    if discount is not None and any(t.turns for t in sequences):
        rewards, returns_R = _returns(chosen, discount)
        columns[TURN_RETURNS] = np.repeat(returns_R, length_R)
    cu_seqlens_S1 = np.zeros(len(chosen) + 1, dtype=np.int32)
    np.cumsum([sum(len(r.segment) for r in runs) for _, runs in chosen], out=cu_seqlens_S1[1:])
    token_ids_T, logprobs_T = joined([NO_TOKENS, *(segment.arrays[:2] for segment in segments)])
    return TokenBatch(
        step=step,
        token_ids_T=token_ids_T,
        loss_mask_T=trained_T.astype(np.float32),
        rollout_logprobs_T=np.where(trained_T, logprobs_T, np.float32(0.0)),
        version_T=version_T,
        lag_T=np.where(trained_T, step - version_T, 0).astype(np.int32),
        cu_seqlens_S1=cu_seqlens_S1,
        rewards_S=np.array(rewards, dtype=np.float32),
        group_ids_S=np.array([t.group_id for t in sequences], dtype=np.int64),
        trajectory_ids_S=np.array([t.trajectory_id for t in sequences], dtype=np.int64),
        prompt_lengths_S=np.array([_opening(runs) for _, runs in chosen], dtype=np.int32),
        truncated_S=np.array([t.finish_reason is FinishReason.LENGTH for t in sequences], bool),
        resumed_S=np.array([t.resumed for t in sequences], dtype=bool),
        columns=columns,
        temperature=temperature,
        extra_metrics={"stale_masked_tokens": float((own_T & ~trained_T).sum())},
    )


def _numbers(
    segments: Sequence[Segment], step: int, lineage: int, branch_points: Mapping[int, int]
) -> IntArray:
    """Return a number for each segment: the policy number on `lineage` that its policy version
    counts as (see `number_on_lineage`), or -1 if the segment is a prompt or from the environment.

    Args:
        segments: The segments.
        step: Number of the update that will train the segments.
        lineage: The current lineage.
        branch_points: For every earlier lineage, the last policy number that it shares with
            `lineage`.

    Raises:
        ValueError: If a number is above `step`, or a segment's lineage is unknown.
    """
    version_R = np.array(
        [
            NO_VERSION
            if s.from_environment
            else number_on_lineage(s.version, lineage, branch_points)
            for s in segments
        ],
        dtype=np.int32,
    )
    if version_R.size and int(version_R.max()) > step:
        raise ValueError(
            f"batch {step} has a token of policy number {int(version_R.max())}, which does not "
            "exist before that update"
        )
    return version_R


def number_on_lineage(
    version: PolicyVersion, lineage: int, branch_points: Mapping[int, int]
) -> int:
    """Return the policy number on `lineage` that `version` counts as.

    For a version of another lineage this is `min(version.number, branch_points[version.lineage])`:
    the other lineage has the same weights as `lineage` up to its branch point, and later versions
    count as the branch point.

    Args:
        version: The policy version.
        lineage: The current lineage.
        branch_points: For every other lineage, the last policy number that it shares with
            `lineage`.

    Raises:
        ValueError: If `branch_points` has no entry for the version's lineage.
    """
    if version.lineage == lineage:
        return version.number
    if version.lineage not in branch_points:
        raise ValueError(
            f"no branch point is known for lineage {version.lineage} of policy version {version}; "
            f"the current lineage is {lineage}"
        )
    return min(version.number, branch_points[version.lineage])


def _trainable(trajectory: Trajectory) -> list[tuple[BranchSpan, ...]]:
    """Return the branches of a trajectory, each of which is one sequence to train on.

    A branch is a path through the turns of an episode; a trajectory without turns is one branch.
    A branch must begin with a token of the prompt or, if the prompt is empty, of the environment,
    because a policy token without a preceding token has no log-prob.

    Raises:
        ValueError: If the trajectory has no reward, or a branch has no token before its first
            policy token.
    """
    name = f"trajectory {trajectory.trajectory_id}"
    if trajectory.reward is None:
        raise ValueError(f"{name} is {trajectory.state} and has no reward; it cannot be batched")
    branches = trajectory.spans()
    if not all(map(_opening, branches)):
        raise ValueError(
            f"{name} has a branch that does not begin with a prompt or environment token; the "
            "branch's first policy token would have no log-prob"
        )
    return branches


def _opening(runs: Sequence[BranchSpan]) -> int:
    """Return the number of prompt and environment tokens before a branch's first policy token."""
    later = enumerate(runs[1:], start=1)
    own = (i for i, run in later if run.turn is None or not run.segment.from_environment)
    return sum(len(run.segment) for run in runs[: next(own, len(runs))])


def _returns(
    chosen: Sequence[tuple[Trajectory, Sequence[BranchSpan]]], discount: float
) -> tuple[list[float | None], list[np.float32]]:
    """Compute, for each sequence, its trajectory's first return; and the return of each segment.

    The return of a turn is the discounted sum of the rewards from this turn on. The first return
    belongs to the first turn. Without turns, it is the trajectory's reward. A trained segment has
    the return of its turn, and other segments have 0. The returns of segments are rounded to
    float32. `pack_groups` rounds the first returns, which become the rewards of the batch, to
    float32 too. So a trained token of a first turn has exactly the return that is its sequence's
    reward.
    """
    rewards: list[float | None] = []
    of_runs: list[np.float32] = []
    for trajectory, runs in chosen:
        turns = trajectory.returns(discount) if trajectory.turns else [trajectory.reward]
        rewards.append(turns[0])
        of_runs += [np.float32(turns[run.turn or 0] if run.trained else 0.0) for run in runs]
    return rewards, of_runs


def _columns(segments: Sequence[Segment]) -> dict[str, Array]:
    """Collect the columns besides ids and log-probs of all segments, by name.

    Each has shape [T, *inner] for T tokens, with 0 for the tokens of segments without the column.

    Raises:
        TypeError: If two segments have columns with the same name and different types.
    """
    found: dict[str, Array] = {}
    ends = list(itertools.accumulate(map(len, segments)))
    for segment, end in zip(segments, ends, strict=True):
        for column in segment.columns:
            [(name, *_)] = column.dtype.descr
            whole = found.setdefault(name, np.zeros(ends[-1], column.dtype))
            np.copyto(whole[end - len(segment) : end], column, casting="no")
    return {name: whole[name] for name, whole in found.items()}
