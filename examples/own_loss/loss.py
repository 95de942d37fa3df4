"""A loss of one's own: PPO whose clip narrows as a token's policy grows old.

The function gets the trained tokens of a microbatch of whole sequences, as packed streams of T
tokens, and returns the loss of each token, [T], in plain torch. Autograd differentiates it;
masking, averaging over all ranks and microbatches, KL and entropy bonus stay the trainer's.
"""

import torch
from megatron_async_kernels import LossInputs


def narrowing_clip(tokens: LossInputs, clip: float = 0.2, per_lag: float = 0.5) -> torch.Tensor:
    """max(-r A, -clip(r) A), with the ratio r to the policy that wrote the token, clipped at
    clip * per_lag ** lag (`lag_T`: by how many updates that policy is behind)."""
    ratio_T = torch.exp(tokens.logprobs_T - tokens.rollout_logprobs_T)
    width_T = clip * per_lag ** tokens.lag_T.float()
    free_T = -ratio_T * tokens.advantages_T
    # No gradient through `clamp`: at its bounds it depends on the version of torch.
    bounded_T = -ratio_T.detach().clamp(1 - width_T, 1 + width_T) * tokens.advantages_T
    return torch.where(bounded_T > free_T, bounded_T, free_T)
