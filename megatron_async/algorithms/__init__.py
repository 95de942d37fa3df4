"""Computes advantages, rollout correction and metrics by pure functions of tensors, and calls the
losses.

Rollout correction accounts for the difference between the policy that generated a token and the
policy that is trained.

- algorithm: `Algorithm`, which the trainer calls. It never modifies a batch; each step returns a
  new one.
- device_batch: a batch as tensors on the device, to which it is copied once.
- advantages: computes advantages from rewards, and the shaping and filtering of rewards.
- correction: rollout correction by importance weights and rejection masks. Weights have no
  gradient. The metrics of this module begin with `rollout_corr/`.
- loss_settings: converts a run's settings to the thresholds of a loss.
- own_loss: imports a loss that the user has written (`algorithm.loss`, examples/own_loss) and calls
  it once on a small example before a run starts.
- metrics: computes the metrics that a run reports from sums over tokens. A mean over no tokens is
  left out.

The losses themselves are in `megatron_async_kernels`: `surrogates` has one formula for each.
`loss_torch.policy_loss` is the specification, and `is_loss` computes the same loss on GPUs with
Triton kernels. The names of the losses are in `config.algorithm`.
"""
