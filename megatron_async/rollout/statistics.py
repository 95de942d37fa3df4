"""Counts of the rollout side, and the metrics that each batch carries with it.

Invariants
- Counters only grow; a batch's metrics are differences since the batch before it.
- Times are wall-clock seconds of the driver's process.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from megatron_async.trajectory.batch import TokenBatch


@dataclass
class _Marks:
    """Values of the counters when the batch before was emitted."""

    tokens: int = 0
    at: float = field(default_factory=time.monotonic)
    paused: float = 0.0
    slot_seconds: float = 0.0


class RolloutStatistics:
    """Accumulates what the driver sees; reads nothing but the clock."""

    def __init__(self) -> None:
        self.tokens = 0
        self.dropped_by_reason: Counter[str] = Counter()
        self.warnings: dict[str, str] = {}
        self.warning_counts: Counter[str] = Counter()
        self._marks = _Marks()
        self._phase_began = time.monotonic()
        self._update_began: float | None = None
        self._paused = 0.0
        self._batch_ready: dict[int, float] = {}
        self.trainer_waited = 0.0
        self._trainer_asked: float | None = None
        self._running = 0
        self._running_since = time.monotonic()
        self._slot_seconds = 0.0
        self._peak_running = 1

    def running_changed(self, running: int) -> None:
        """`running` requests are in flight from now on."""
        now = time.monotonic()
        self._slot_seconds += self._running * (now - self._running_since)
        self._running, self._running_since = running, now
        self._peak_running = max(self._peak_running, running)

    def generated(self, count: int) -> None:
        """`count` more tokens arrived."""
        self.tokens += count

    def dropped(self, reason: str) -> None:
        """A trajectory left the run."""
        self.dropped_by_reason[str(reason)] += 1

    def warned(self, name: str, message: str) -> None:
        """A named warning; the newest message of a name is kept."""
        self.warnings[name] = message
        self.warning_counts[name] += 1

    def trainer_asked(self) -> None:
        """The trainer began to wait for a batch."""
        self._trainer_asked = time.monotonic()

    def trainer_took(self, step: int) -> None:
        """The trainer has its batch."""
        if self._trainer_asked is not None:
            self.trainer_waited += time.monotonic() - self._trainer_asked
            self._trainer_asked = None
        self._batch_ready.pop(step, None)

    def update_began(self) -> None:
        """Generation stands still for a weight transfer from here on."""
        self._update_began = time.monotonic()

    def update_ended(self) -> None:
        """Generation may go on."""
        now = time.monotonic()
        if self._update_began is not None:
            self._paused += now - self._update_began
        self._update_began = None
        self._phase_began = now

    def batch_metrics(self, batch: TokenBatch) -> dict[str, float]:
        """`rollout/*` metrics of a batch that is complete now."""
        self.running_changed(self._running)
        now = time.monotonic()
        tokens = self.tokens - self._marks.tokens
        seconds = max(now - self._marks.at, 1e-9)
        generating = max(now - self._phase_began, 1e-9)
        lengths_S = batch.lengths_S() - batch.prompt_lengths_S
        trained = batch.loss_mask_T > 0
        lag = batch.lag_T[trained]
        metrics = {
            "rollout/tokens": float(tokens),
            "rollout/tokens_per_second": tokens / min(seconds, generating) if tokens else 0.0,
            "rollout/seconds": generating,
            "rollout/slots_busy_share": (self._slot_seconds - self._marks.slot_seconds)
            / (self._peak_running * min(seconds, generating)),
            "rollout/seconds_since_last_batch": seconds,
            "rollout/update_pause_seconds": self._paused - self._marks.paused,
            "rollout/reward_mean": float(batch.rewards_S.mean()) if batch.num_sequences else 0.0,
            "rollout/response_length_mean": float(lengths_S.mean()) if len(lengths_S) else 0.0,
            "rollout/response_length_max": float(lengths_S.max(initial=0)),
            "rollout/truncated_share": float(batch.truncated_S.mean()),
            "rollout/resumed_share": float(batch.resumed_S.mean()),
            "rollout/lag_mean": float(lag.mean()) if lag.size else 0.0,
            "rollout/lag_max": float(lag.max(initial=0)),
            "rollout/off_policy_token_share": float(np.mean(lag > 0)) if lag.size else 0.0,
        }
        for reason, count in self.dropped_by_reason.items():
            metrics[f"rollout/dropped_{reason}"] = float(count)
        self._marks = _Marks(self.tokens, now, self._paused, self._slot_seconds)
        return metrics
