"""From complete groups to one packed `TokenBatch`: versions, lags and masks of every token.

Invariants
- The policy number of a token is counted along the current lineage: a token of version (l, a)
  whose lineage parted from that one at n0 counts as number min(a, n0), so that its lag in update n
  is n - min(a, n0) (docs/semantics.md section 1). Every lag is >= 0.
- Trained (mask 1) are exactly the policy's own tokens that no staleness rule masks. Everything else
  has mask 0, log-prob 0 and lag 0. A token masked for staleness keeps its number in `version_T`,
  prompt and environment tokens have -1.
- Groups stay in the order given and their trajectories are neighbours. Dropped trajectories of a
  group are left out; any other without a reward is an error.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.columns import LOGPROBS, NO_TOKENS, TOKEN_IDS, Array, joined
from megatron_async.trajectory.types import (
    FinishReason,
    Group,
    IntArray,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
)

NO_VERSION = -1


def pack_groups(
    groups: Sequence[Group],
    *,
    step: int,
    lineage: int,
    branch_points: Mapping[int, int],
    temperature: float = 1.0,
    mask_before: int | None = None,
) -> TokenBatch:
    """The batch of update `step` on `lineage`, from complete and scored groups.

    `branch_points[l]` is the policy number at which lineage l parted from the current one. Tokens
    of a policy number below `mask_before` are not trained.
    Raises ValueError for a trajectory that cannot be trained on (no reward, an empty prompt, an
    unknown lineage, or tokens of a policy newer than `step`), naming it.
    """
    chosen = [
        trajectory
        for group in groups
        for trajectory in group.trajectories
        if trajectory.state is not TrajectoryState.DROPPED
    ]
    for trajectory in chosen:
        _check_trainable(trajectory)

    runs = [run for t in chosen for run in (_context(t.prompt), *t.segments)]
    version_R = np.array(
        [
            NO_VERSION
            if r.from_environment
            else number_on_lineage(r.version, lineage, branch_points)
            for r in runs
        ],
        dtype=np.int32,
    )
    if version_R.size and int(version_R.max()) > step:
        raise ValueError(
            f"batch {step} holds a token of policy number {int(version_R.max())}, which does not "
            "exist before that update"
        )
    length_R = np.array([len(run) for run in runs], dtype=np.int64)
    version_T: IntArray = np.repeat(version_R, length_R)

    by_policy_T = version_T != NO_VERSION
    trained_T = by_policy_T.copy()
    if mask_before is not None:
        trained_T &= version_T >= mask_before

    cu_seqlens_S1 = np.zeros(len(chosen) + 1, dtype=np.int32)
    np.cumsum([len(t.prompt.token_ids) + t.response_length for t in chosen], out=cu_seqlens_S1[1:])
    token_ids_T, logprobs_T = joined([NO_TOKENS, *(run.arrays[:2] for run in runs)])
    return TokenBatch(
        step=step,
        token_ids_T=token_ids_T,
        loss_mask_T=trained_T.astype(np.float32),
        rollout_logprobs_T=np.where(trained_T, logprobs_T, np.float32(0.0)),
        version_T=version_T,
        lag_T=np.where(trained_T, step - version_T, 0).astype(np.int32),
        cu_seqlens_S1=cu_seqlens_S1,
        rewards_S=np.array([t.reward for t in chosen], dtype=np.float32),
        group_ids_S=np.array([t.group_id for t in chosen], dtype=np.int64),
        trajectory_ids_S=np.array([t.trajectory_id for t in chosen], dtype=np.int64),
        prompt_lengths_S=np.array([len(t.prompt.token_ids) for t in chosen], dtype=np.int32),
        truncated_S=np.array([t.finish_reason is FinishReason.LENGTH for t in chosen], dtype=bool),
        resumed_S=np.array([t.resumed for t in chosen], dtype=bool),
        columns=_columns(runs, len(token_ids_T)),
        temperature=temperature,
        extra_metrics={"stale_masked_tokens": float((by_policy_T & ~trained_T).sum())},
    )


def number_on_lineage(
    version: PolicyVersion, lineage: int, branch_points: Mapping[int, int]
) -> int:
    """The policy number of `version` counted along `lineage`: min(a, n0) off it.

    Raises ValueError for a lineage that `branch_points` does not know.
    """
    if version.lineage == lineage:
        return version.number
    if version.lineage not in branch_points:
        raise ValueError(
            f"no branch point is known for lineage {version.lineage} of policy version {version}; "
            f"the current lineage is {lineage}"
        )
    return min(version.number, branch_points[version.lineage])


def _check_trainable(trajectory: Trajectory) -> None:
    name = f"trajectory {trajectory.trajectory_id}"
    if trajectory.reward is None:
        raise ValueError(f"{name} is {trajectory.state} and has no reward; it cannot be batched")
    if len(trajectory.prompt.token_ids) == 0:
        raise ValueError(f"{name} has an empty prompt; its first token would have no log-prob")


def _context(prompt: Prompt) -> Segment:
    """A prompt as what it is to the policy: tokens of the environment."""
    ids = np.asarray(prompt.token_ids, TOKEN_IDS)
    return Segment(ids, np.zeros(len(ids), LOGPROBS), PolicyVersion(0, 0), from_environment=True)


def _columns(runs: Sequence[Segment], num_tokens: int) -> dict[str, Array]:
    """The further columns of any run, 0 elsewhere. Raises TypeError where two of a name differ."""
    found: dict[str, Array] = {}
    start = 0
    for run in runs:
        for column in run.columns:
            [(name, *_)] = column.dtype.descr
            whole = found.setdefault(name, np.zeros(num_tokens, column.dtype))
            np.copyto(whole[start : start + len(run)], column, casting="no")
        start += len(run)
    return {name: whole[name] for name, whole in found.items()}
