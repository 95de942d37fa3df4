"""Advantages, rollout correction and metrics: pure functions of tensors.

- algorithm: the seam with the trainer. A batch is never modified; each step returns a new one.
- device_batch: a batch as tensors on the device, where it goes once.
- advantages: from rewards to advantages, with shaping and filtering before them.
- correction: importance weights and rejection masks. Weights carry no gradient. Their
  metrics are under `rollout_corr/`.
- loss_settings: from a run's settings to the thresholds of a loss.
- own_loss: a user's loss by import path (`algorithm.loss`, examples/own_loss), tried before a run.
- metrics: from additive sums to what a run reports; a mean over nothing is left out. Sum, mean,
  extremes and deviation of a tensor, defined for no element at all.

The losses themselves are in `megatron_async_kernels`: `surrogates` has one formula for each,
`loss_torch.policy_loss` is the specification, and `is_loss` is the same in Triton. Their names are
in `config.algorithm`.
"""
