"""Train the head of a language model from hidden states, without a tensor of logits."""

import torch
from megatron_async_kernels import Denominators, LossConfig, LossInputs, is_loss, token_logprob

CONFIG = LossConfig(surrogate="ppo_clip", clip_low=0.2, clip_high=0.28)


def step(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    tokens_T: torch.Tensor,
    rollout_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    cu_seqlens_S1: torch.Tensor,
) -> float:
    """Compute the PPO-clip gradients of packed sequences in `weight_VD.grad`; return the loss."""
    mask_T = torch.ones_like(advantages_T)
    logprobs_T = token_logprob(hidden_TD, weight_VD, tokens_T)  # creates no [T, V] tensor
    inputs = LossInputs(
        logprobs_T.detach(), rollout_logprobs_T, advantages_T, mask_T, cu_seqlens_S1
    )
    count = Denominators(tokens=len(tokens_T), sequences=len(cu_seqlens_S1) - 1)
    out = is_loss(inputs, CONFIG, count)
    logprobs_T.backward(out.dlogp_T)  # `is_loss` returns the gradient with the loss
    return out.loss_sum.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    hidden_TD, weight_VD = torch.randn(12, 32), torch.randn(1000, 32).div(6).requires_grad_()
    tokens_T, cu_seqlens_S1 = torch.randint(1000, (12,)), torch.tensor([0, 5, 12])
    rollout_T = token_logprob(hidden_TD, weight_VD, tokens_T).detach()
    advantages_T = torch.tensor([1.0] * 5 + [-1.0] * 7)
    optimizer = torch.optim.SGD([weight_VD], lr=0.1)
    for number in range(5):
        optimizer.zero_grad()
        loss = step(hidden_TD, weight_VD, tokens_T, rollout_T, advantages_T, cu_seqlens_S1)
        optimizer.step()
        print(f"update {number}: loss {loss:+.3f}")
