"""Counts of the rollout side, and the metrics that each batch carries with it.

Invariants
- Counters only grow; a batch's metrics are differences since the batch before it.
- Times are wall-clock seconds of the driver's process.
- Generation time is the time in which requests may run: it stands still from the emission of a
  batch (without `overlap`) or from the beginning of a weight update until that update has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron_async.trajectory.batch import TokenBatch


@dataclass
class _Marks:
    """Values of the counters when the batch before was emitted."""

    tokens: int = 0
    at: float = 0.0
    paused: float = 0.0
    generating: float = 0.0
    slot_seconds: float = 0.0


class RolloutStatistics:
    """Accumulates what the driver sees; reads nothing but the clock."""

    def __init__(self, *, overlap: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """`overlap`: generation goes on while the trainer works on a batch."""
        self._overlap = overlap
        self._clock = clock
        self.tokens = 0
        self.dropped_by_reason: Counter[str] = Counter()
        self.warnings: dict[str, str] = {}
        self.warning_counts: Counter[str] = Counter()
        self._marks = _Marks(at=clock())
        self._open = True
        self._generating = 0.0
        self._counted_until = clock()
        self._update_began: float | None = None
        self._paused = 0.0
        self.trainer_waited = 0.0
        self._trainer_asked: float | None = None
        self._running = 0
        self._slot_seconds = 0.0
        self._peak_running = 1

    def running_changed(self, running: int) -> None:
        """`running` requests are in flight from now on."""
        self._count_time()
        self._running = running
        self._peak_running = max(self._peak_running, running)

    def _count_time(self) -> None:
        now = self._clock()
        if self._open:
            self._generating += now - self._counted_until
            self._slot_seconds += self._running * (now - self._counted_until)
        self._counted_until = now

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
        self._trainer_asked = self._clock()

    def trainer_took(self) -> None:
        """The trainer has its batch."""
        if self._trainer_asked is not None:
            self.trainer_waited += self._clock() - self._trainer_asked
            self._trainer_asked = None

    def update_began(self) -> None:
        """Generation stands still for a weight transfer from here on."""
        self._count_time()
        self._open = False
        self._update_began = self._counted_until

    def update_ended(self) -> None:
        """Generation may go on."""
        self._count_time()
        self._open = True
        if self._update_began is not None:
            self._paused += self._counted_until - self._update_began
        self._update_began = None

    def batch_metrics(self, batch: TokenBatch) -> dict[str, float]:
        """`rollout/*` metrics of a batch that is complete now."""
        self._count_time()
        self._open = self._open and self._overlap
        now = self._counted_until
        tokens = self.tokens - self._marks.tokens
        seconds = max(now - self._marks.at, 1e-9)
        generating = max(self._generating - self._marks.generating, 1e-9)
        lengths_S = batch.lengths_S() - batch.prompt_lengths_S
        trained = batch.loss_mask_T > 0
        lag = batch.lag_T[trained]
        metrics = {
            "rollout/tokens": float(tokens),
            "rollout/tokens_per_second": tokens / generating,
            "rollout/seconds": generating,
            "rollout/slots_busy_share": (self._slot_seconds - self._marks.slot_seconds)
            / (self._peak_running * generating),
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
        self._marks = _Marks(self.tokens, now, self._paused, self._generating, self._slot_seconds)
        return metrics
