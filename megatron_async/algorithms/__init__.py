"""Computes advantages, rollout correction and metrics, as pure functions of tensors.

Rollout correction accounts for the difference between the policy that generated a token and the
policy that is trained.

- algorithm: `Algorithm`, which the trainer calls. It never modifies a batch; each step returns a
  new one.
- device_batch: a batch as tensors on the device, to which it is copied once.
- advantages: computes advantages from rewards, and the shaping and filtering of rewards.
- correction: rollout correction by importance weights and rejection masks. Weights have no
  gradient. The metrics of this module begin with `rollout_corr/`.
- loss_settings: converts a run's settings to the thresholds of a loss.
- own_loss: loads a user's loss by import path (`algorithm.loss`, examples/own_loss) and tries it
  before a run starts.
- metrics: converts sums to the metrics that a run reports. A mean over nothing is left out.

The losses themselves are in `megatron_async_kernels`: `surrogates` has one formula for each,
`loss_torch.policy_loss` is the specification, and `is_loss` is the same in Triton. The names of the
losses are in `config.algorithm`.
"""
