"""`StepReport`: what one training step did, the same on every rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_async.trajectory.types import FloatArray


@dataclass(frozen=True)
class StepReport:
    """Results of a batch with H optimizer updates.

    `step` is the number of the batch (policy version before it); the trainer's own step is
    `step + 1` afterwards, skipped or not. `loss` is the mean over the updates that were applied,
    `grad_norm` that of the last one before clipping. `metrics` holds the algorithm's scalars,
    token means over the whole batch. `skipped` is true when no update at all was applied: the
    weights are unchanged and the batch is to be marked dropped(nonfinite); `skipped_updates`
    counts single ones. `seconds` is wall time on this rank. `log_weights` are the logarithms of the
    raw importance weights of all trained tokens, update after update.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    updates: int
    skipped_updates: int
    skipped: bool
    skip_reason: str | None
    num_sequences: int
    num_tokens: int
    num_trained_tokens: int
    num_microbatches: int
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    log_weights: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the batch (prompts included) a second of the step, on all ranks together."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0
