"""Correct for stale data in a training loop of your own: weights, rejection, diagnostics."""

import torch

from megatron_async.algorithms.correction import compute_rollout_correction


def corrected_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, float]]:
    """REINFORCE on padded [B, L] responses that an older policy or another engine wrote."""
    weights, kept, metrics = compute_rollout_correction(
        logprobs.detach(),
        rollout_logprobs,
        mask,
        rollout_is="token",  # w = exp(log pi - log mu), at most 2, without a gradient
        rollout_is_threshold=2.0,
        rollout_rs="seq_mean_k1",  # responses whose mean ratio is outside 0.5 to 2 are left out
        rollout_rs_threshold="0.5_2.0",
    )
    loss = -(weights * advantages * logprobs * kept).sum() / kept.sum().clamp(min=1)
    return loss, metrics


if __name__ == "__main__":
    torch.manual_seed(0)
    now = torch.randn(4, 6).sub(1).requires_grad_()
    then, mask = now.detach() + 0.1 * torch.randn(4, 6), torch.ones(4, 6)
    then[3] -= 3  # a response of a policy that is far away
    loss, metrics = corrected_loss(now, then, torch.tensor([[1.0], [-1.0], [1.0], [1.0]]), mask)
    loss.backward()
    print(f"loss {loss.item():.3f}, gradient of the far response {now.grad[3].abs().sum():.3f}")
    print(
        {name: round(value, 3) for name, value in metrics.items() if "ess" in name or "kl" in name}
    )
