"""Correct for stale data in your own training loop, with weights, rejection and diagnostics."""

import torch

from megatron_async.algorithms.correction import compute_rollout_correction


def corrected_loss(
    logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the REINFORCE loss of padded [B, L] responses of an older policy, and metrics."""
    weights, kept, metrics = compute_rollout_correction(
        logprobs.detach(),
        rollout_logprobs,
        mask,
        rollout_is="token",  # w = exp(log pi - log mu), truncated at 2, no gradient
        rollout_is_threshold=2.0,
        rollout_rs="seq_mean_k1",  # rejects responses whose mean ratio is not in 0.5 to 2
        rollout_rs_threshold="0.5_2.0",
    )
    loss = -(weights * advantages * logprobs * kept).sum() / kept.sum().clamp(min=1)
    return loss, metrics


if __name__ == "__main__":
    torch.manual_seed(0)
    now = torch.randn(4, 6).sub(1).requires_grad_()
    then, mask = now.detach() + 0.1 * torch.randn(4, 6), torch.ones(4, 6)
    then[3] -= 3  # the policy of this response differs too much, so it is rejected
    loss, metrics = corrected_loss(now, then, torch.tensor([[1.0], [-1.0], [1.0], [1.0]]), mask)
    loss.backward()
    print(f"loss {loss.item():.3f}, gradient of the rejected one {now.grad[3].abs().sum():.3f}")
    print(
        {name: round(value, 3) for name, value in metrics.items() if "ess" in name or "kl" in name}
    )
