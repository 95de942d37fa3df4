"""A user-defined loss: PPO with a narrower clip for tokens of older policy versions.

The function receives a microbatch of whole sequences as packed streams of T tokens, and returns the
loss of each token, [T], in plain torch. Autograd differentiates the loss. The trainer applies the
mask, averages over all ranks and microbatches, and adds the KL term and the entropy bonus.
"""

import torch
from megatron_async_kernels import LossInputs


def narrowing_clip(tokens: LossInputs, clip: float = 0.2, per_lag: float = 0.5) -> torch.Tensor:
    """Return max(-r A, -clip(r) A) for each token.

    r is the ratio of the current policy to the policy that generated the token. It is clipped to
    1 - width and 1 + width, with width = clip * per_lag ** lag. The lag of a token (`lag_T`) is the
    number of updates by which that policy is older than the current one.
    """
    ratio_T = torch.exp(tokens.logprobs_T - tokens.rollout_logprobs_T)
    width_T = clip * per_lag ** tokens.lag_T.float()
    free_T = -ratio_T * tokens.advantages_T
    # Clamp a detached ratio, because the gradient of `clamp` at its bounds depends on the torch
    # version.
    bounded_T = -ratio_T.detach().clamp(1 - width_T, 1 + width_T) * tokens.advantages_T
    return torch.where(bounded_T > free_T, bounded_T, free_T)
