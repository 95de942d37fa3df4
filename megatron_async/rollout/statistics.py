"""Counts of the rollout side, and the metrics that each batch carries with it.

Invariants
- Counters only grow; a batch's metrics are differences since the batch before it (the first batch:
  since this process began), so that along the batches of one process they add up.
- What was not measured is left out: KV usage before an engine's first report, and what the engine
  had preempted by then; the time of a score where there was none.
- Times are wall-clock seconds of the driver's process.
- Generation time is the time in which requests may run: it stands still from the emission of a
  batch (without `overlap`) or from the beginning of a weight update until that update has ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from megatron_async.scheduler.counts import SchedulerView
from megatron_async.tasks.base import COST, SCORER_FAULTS
from megatron_async.tasks.scorer_count import ScorerCount
from megatron_async.trajectory.batch import TokenBatch
from megatron_async.trajectory.sample_lag import SamplesTrained
from megatron_async.trajectory.types import DropReason

_LEAST_GENERATING_SECONDS = 0.5
"""Generation that a rate is measured over at least: a batch that was ready before its turn has
none, and what arrived meanwhile counts for the next."""


@dataclass
class _Marks:
    """Values of the counters when the batch before was emitted."""

    tokens: int = 0
    at: float = 0.0
    paused: float = 0.0
    generating: float = 0.0
    slot_seconds: float = 0.0
    preemptions: int = 0
    wasted_tokens: int = 0
    filtered_tokens: int = 0
    restarted: int = 0
    regenerated: int = 0
    scores: int = 0
    score_seconds: float = 0.0
    looked_for_answers: int = 0
    answers: int = 0
    cost: float = 0.0
    dropped: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


class RolloutStatistics:
    """Accumulates what the driver sees; reads nothing but the clock."""

    def __init__(
        self,
        *,
        overlap: bool,
        trained: SamplesTrained | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`overlap`: generation goes on while the trainer works on a batch.

        `trained`: what was trained before the first batch.
        """
        self._overlap = overlap
        self._trained = trained or SamplesTrained()
        self._clock = clock
        self.tokens = 0
        self.dropped_by_reason: Counter[str] = Counter()
        self.scorer_faults: Counter[str] = Counter()
        self.warnings: dict[str, str] = {}
        self._new_warnings: list[tuple[str, str]] = []
        self._marks = _Marks(at=clock())
        self._open = True
        self._generating = 0.0
        self._counted_until = clock()
        self._update_began: float | None = None
        self._paused = 0.0
        self._running = 0
        self._slot_seconds = 0.0
        self._peak_running = 1
        self._preemptions = 0
        self._kv_usage: dict[str, float] = {}
        self._kv_reports: list[float] = []
        self._unscored = 0
        self._longest_queue = 0
        self._scores = 0
        self._score_seconds = 0.0
        self._rated_generating = 0.0
        self._rated_tokens = 0
        self._looked_for_answers = 0
        self._answers = 0
        self._cost = 0.0

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

    def loaded(self, engine_id: str, kv_usage: float, preemptions: int) -> None:
        """Take an engine's report: share of its KV cache in use, preemptions since the last one."""
        self._preemptions += preemptions
        self._kv_usage[engine_id] = kv_usage
        self._kv_reports.append(kv_usage)

    def score_wanted(self) -> None:
        """Count a response that waits for its score."""
        self._unscored += 1
        self._longest_queue = max(self._longest_queue, self._unscored)

    def engine_lost(self, engine_id: str) -> None:
        """Discard the last report of a lost engine."""
        self._kv_usage.pop(engine_id, None)

    def scored(self, detail: Mapping[str, float], seconds: float) -> None:
        """A score has come, with these parts, so long after the response's end; or none came."""
        self._unscored -= 1
        self._scores += 1
        self._score_seconds += seconds
        if "answered" in detail:
            self._looked_for_answers += 1
            self._answers += int(detail["answered"] > 0)
        for part, metric in SCORER_FAULTS.items():
            self.scorer_faults[metric] += int(detail.get(part, 0))
        self._cost += sum(v for name, v in detail.items() if name.rpartition(".")[2] == COST)

    def dropped(self, reason: str) -> None:
        """A trajectory left the run."""
        self.dropped_by_reason[str(reason)] += 1

    def batch_dropped(self, step: int, reason: str, trajectories: int) -> None:
        """The trainer could not use the batch of `step`."""
        self._trained.drop(step)
        self.dropped_by_reason[str(reason)] += trajectories

    def warned(self, name: str, message: str) -> None:
        """A named warning; `warnings` keeps the newest message of a name."""
        self.warnings[name] = message
        self._new_warnings.append((name, message))

    def take_warnings(self) -> tuple[tuple[str, str], ...]:
        """(name, message) of all since the last call."""
        news, self._new_warnings = self._new_warnings, []
        return tuple(news)

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

    def batch_metrics(
        self, batch: TokenBatch, view: SchedulerView, scorers: ScorerCount
    ) -> dict[str, float]:
        """`rollout/*` metrics (docs/schedules.md) of a batch that is complete now; call it once."""
        self._count_time()
        self._open = self._open and self._overlap
        now = self._counted_until
        tokens = self.tokens - self._marks.tokens
        seconds = max(now - self._marks.at, 1e-9)
        generating = max(self._generating - self._marks.generating, 1e-9)
        lengths_S = batch.lengths_S() - batch.prompt_lengths_S
        trained = batch.loss_mask_T > 0
        lag = batch.lag_T[trained]
        lag_samples_S = self._trained.lag_S(batch)
        self._trained.add(batch.step, batch.num_sequences)
        metrics = {
            "rollout/concurrency": float(view.concurrency),
            "rollout/tokens": float(tokens),
            "rollout/seconds": generating,
            "rollout/slots_busy_share": (self._slot_seconds - self._marks.slot_seconds)
            / (self._peak_running * generating),
            "rollout/seconds_since_last_batch": seconds,
            "rollout/update_pause_seconds": self._paused - self._marks.paused,
            "rollout/trajectories": float(batch.num_sequences),
            "rollout/reward_mean": float(batch.rewards_S.mean()) if batch.num_sequences else 0.0,
            "rollout/response_length_mean": float(lengths_S.mean()) if len(lengths_S) else 0.0,
            "rollout/response_length_max": float(lengths_S.max(initial=0)),
            "rollout/truncated_share": float(batch.truncated_S.mean()),
            "rollout/resumed_share": float(batch.resumed_S.mean()),
            "rollout/lag_mean": float(lag.mean()) if lag.size else 0.0,
            "rollout/lag_max": float(lag.max(initial=0)),
            "rollout/off_policy_token_share": float(np.mean(lag > 0)) if lag.size else 0.0,
            "rollout/lag_samples_mean": float(lag_samples_S.mean()) if len(lag_samples_S) else 0.0,
            "rollout/lag_samples_max": float(lag_samples_S.max(initial=0)),
            "rollout/preemptions": float(self._preemptions - self._marks.preemptions),
            "rollout/wasted_tokens": float(view.wasted_tokens - self._marks.wasted_tokens),
            "rollout/filtered_tokens": float(view.filtered_tokens - self._marks.filtered_tokens),
            "rollout/restarted": float(view.restarted - self._marks.restarted),
            "rollout/regenerated": float(view.regenerated - self._marks.regenerated),
            "rollout/score_queue": float(self._unscored),
            "rollout/score_queue_max": float(self._longest_queue),
            "rollout/scorers": float(scorers.count),
            "rollout/scorer_seconds": scorers.seconds,
        }
        since_rate = self._generating - self._rated_generating
        if since_rate >= _LEAST_GENERATING_SECONDS:
            metrics["rollout/tokens_per_second"] = (self.tokens - self._rated_tokens) / since_rate
            self._rated_generating, self._rated_tokens = self._generating, self.tokens
        scores = self._scores - self._marks.scores
        if scores:
            waited = self._score_seconds - self._marks.score_seconds
            metrics["rollout/score_seconds"] = waited / scores
        looked_for = self._looked_for_answers - self._marks.looked_for_answers
        if looked_for:
            found = self._answers - self._marks.answers
            metrics["rollout/answered_share"] = found / looked_for
        if self._cost > self._marks.cost:
            metrics["rollout/score_cost"] = self._cost - self._marks.cost
        self._longest_queue = self._unscored
        for reason in DropReason:
            news = self.dropped_by_reason[reason] - self._marks.dropped[reason]
            metrics[f"rollout/dropped_{reason}"] = float(news)
        for name in SCORER_FAULTS.values():
            news = self.scorer_faults[name] - self._marks.faults[name]
            metrics[f"rollout/{name}"] = float(news)
        reports = self._kv_reports or list(self._kv_usage.values())
        if reports:
            metrics["rollout/kv_usage"] = float(np.mean(reports))
            metrics["rollout/kv_usage_max"] = max(reports)
        self._kv_reports = []
        # `auto` may have lowered N'; until what runs has ended, more slots than N' are in use
        self._peak_running = min(self._peak_running, max(view.concurrency, self._running))
        self._marks = _Marks(
            tokens=self.tokens,
            at=now,
            paused=self._paused,
            generating=self._generating,
            slot_seconds=self._slot_seconds,
            preemptions=self._preemptions,
            wasted_tokens=view.wasted_tokens,
            filtered_tokens=view.filtered_tokens,
            restarted=view.restarted,
            regenerated=view.regenerated,
            scores=self._scores,
            score_seconds=self._score_seconds,
            looked_for_answers=self._looked_for_answers,
            answers=self._answers,
            cost=self._cost,
            dropped=Counter(self.dropped_by_reason),
            faults=Counter(self.scorer_faults),
        )
        return metrics
