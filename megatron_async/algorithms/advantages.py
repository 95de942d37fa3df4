"""Computes advantages from rewards, and shapes and filters rewards before that.

Invariants
- The functions get all trajectories of a batch or minibatch, which has only whole groups. An array
  `x_S` has one entry for each trajectory in this module; an episode with several sequences is one
  trajectory.
- Arithmetic is in the dtype of the rewards. No result has a gradient.
- If a group has only one trajectory, grpo, dr_grpo and rloo use the mean 0 and grpo the std 1, so
  its advantage is its reward (for grpo divided by 1 + epsilon), as in verl 0.9.1.
"""

import torch
from megatron_async_kernels.loss_types import NonFiniteError


def group_advantages(
    rewards_S: torch.Tensor,
    group_index_S: torch.Tensor,
    *,
    normalize_std: bool = True,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (R - group mean) / (group std + epsilon) for each reward R. The std has n - 1 in its
    denominator (GRPO, arXiv 2402.03300, section 4.1.2).

    Without `normalize_std` the advantage is R - group mean (Dr. GRPO, arXiv 2503.20783).

    Returns:
        The advantages, and their derivatives with respect to R, both [S]. The derivatives treat
        mean and std as constants.
    """
    count_G, sum_G = _group_sums(rewards_S, group_index_S)
    alone_G = count_G == 1
    mean_G = torch.where(alone_G, torch.zeros_like(sum_G), sum_G / count_G)
    centered_S = rewards_S - mean_G[group_index_S]
    if not normalize_std:
        return centered_S, torch.ones_like(centered_S)
    squares_G = torch.zeros_like(sum_G).index_add_(0, group_index_S, centered_S.square())
    std_G = (squares_G / (count_G - 1.0).clamp(min=1.0)).sqrt()
    std_S = torch.where(alone_G, torch.ones_like(std_G), std_G)[group_index_S]
    return centered_S / (std_S + epsilon), 1.0 / (std_S + epsilon)


def leave_one_out_advantages(rewards_S: torch.Tensor, group_index_S: torch.Tensor) -> torch.Tensor:
    """Return, for each trajectory, its reward minus the mean reward of the other trajectories of
    its group (RLOO, arXiv 2402.14740)."""
    count_G, sum_G = _group_sums(rewards_S, group_index_S)
    others_S = (count_G[group_index_S] - 1.0).clamp(min=1.0)
    baseline_S = (sum_G[group_index_S] - rewards_S) / others_S
    return rewards_S - baseline_S


def whitened_advantages(
    rewards_S: torch.Tensor, tokens_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (R - mean) / sqrt(var + 1e-8) for each reward R. The mean and the variance are over
    all trained tokens of the batch, each with the reward of its trajectory; the variance has n - 1
    in its denominator.

    This is REINFORCE++ (arXiv 2501.03262) with discount 1, where the return of each token is the
    reward of its trajectory.

    Args:
        rewards_S: The rewards.
        tokens_S: Number of trained tokens of each trajectory.

    Returns:
        The advantages, and their derivatives with respect to R, both [S]. The derivatives treat
        mean and var as constants. Both are 0 if no token is trained.
    """
    tokens_S = tokens_S.to(rewards_S.dtype)
    count = tokens_S.sum()
    if count == 0:
        return torch.zeros_like(rewards_S), torch.zeros_like(rewards_S)
    centered_S = rewards_S - (rewards_S * tokens_S).sum() / count
    variance = (centered_S.square() * tokens_S).sum() / (count - 1.0).clamp(min=1.0)
    scale = torch.rsqrt(variance + 1e-8)
    return centered_S * scale, scale.expand(len(rewards_S))


def batch_baseline_advantages(rewards_S: torch.Tensor) -> torch.Tensor:
    """Return each reward minus the mean reward of the batch, as in the Monte-Carlo policy gradient
    (REINFORCE, Williams 1992)."""
    return rewards_S - rewards_S.mean() if rewards_S.numel() else rewards_S


def rapid_advantages(
    rewards_S: torch.Tensor,
    log_weights_S: torch.Tensor,
    group_index_S: torch.Tensor,
    *,
    eta: float = 2.0,
    leave_one_out: bool = False,
    bound: float = 20.0,
) -> torch.Tensor:
    """Return RAPID's advantage A_i = R_i - (1 / N_k) * sum_j min(w_j, eta) * R_j of each generation
    i. The sum is over the N_k generations j of the same prompt k (its group).

    R_j is the reward of generation y_j to the prompt x, and w_j is its importance weight. With the
    current policy pi_theta and the policy mu that generated y_j, w_j = exp(l_j) where l_j = log
    pi_theta(y_j | x) - log mu(y_j | x). So w_j changes with every update. l_j is clamped to
    [-bound, bound].

    The paper's Eq. 5 has max(w_j, eta) instead of min. Its text says that the clip bounds the
    weight and that 5 % of the weights are clipped, which is true only of min.

    Args:
        log_weights_S: l_j of each generation, not clamped yet.
        eta: Upper bound of the weights.
        leave_one_out: Whether the sum leaves out j = i and is divided by N_k - 1. The sum is then 0
            in a group with one generation.
        bound: Largest absolute value of a clamped l_j.
    """
    count_G, _ = _group_sums(rewards_S, group_index_S)
    weight_S = log_weights_S.clamp(-bound, bound).exp().clamp(max=eta)
    weighted_S = weight_S * rewards_S
    sum_G = torch.zeros_like(count_G).index_add_(0, group_index_S, weighted_S)
    if leave_one_out:
        others_S = (count_G[group_index_S] - 1.0).clamp(min=1.0)
        return rewards_S - (sum_G[group_index_S] - weighted_S) / others_S
    return rewards_S - sum_G[group_index_S] / count_G[group_index_S]


def overlong_penalty(
    length_S: torch.Tensor, *, max_length: int, buffer: float, penalty: float = 1.0
) -> torch.Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, Eq. 13), which is added to the
    reward.

    It is 0 for lengths up to `max_length` - `buffer` tokens. From there it decreases linearly to
    -`penalty` at `max_length`, and stays there above.
    """
    excess_S = length_S.double() - (max_length - buffer)
    return -penalty * (excess_S / buffer).clamp(0.0, 1.0)


def informative_groups(rewards_S: torch.Tensor, group_index_S: torch.Tensor) -> torch.Tensor:
    """Return, for each group, whether its rewards are not all equal, bool [G] (DAPO's dynamic
    sampling).

    See arXiv 2503.14476, Eq. 11. For rewards that are 0 or 1, a group of N trajectories is
    informative if its number of correct responses is above 0 and below N.
    """
    groups = int(group_index_S.max()) + 1 if group_index_S.numel() else 0
    low_G = rewards_S.new_full((groups,), float("inf"))
    high_G = rewards_S.new_full((groups,), float("-inf"))
    low_G.scatter_reduce_(0, group_index_S, rewards_S, "amin")
    high_G.scatter_reduce_(0, group_index_S, rewards_S, "amax")
    return high_G > low_G


def _group_sums(
    rewards_S: torch.Tensor, group_index_S: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if not bool(torch.isfinite(rewards_S).all()):
        raise NonFiniteError("rewards has non-finite values")
    groups = int(group_index_S.max()) + 1 if group_index_S.numel() else 0
    zero_G = rewards_S.new_zeros(groups)
    count_G = zero_G.index_add(0, group_index_S, torch.ones_like(rewards_S))
    return count_G, zero_G.index_add(0, group_index_S, rewards_S)
