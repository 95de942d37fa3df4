"""Warnings about queues and engines: when each failure that the papers name counts as seen.

`telemetry.health` has those that read the trainer's metrics.

Invariants
- A warning is emitted once when its condition sets in, and again only after it was gone in between.
- The thresholds are assumed (no source gives numbers); each is a named constant.
"""

import enum
from dataclasses import dataclass

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler.events import EngineLoad, Warn

PREEMPTED_SHARE = 0.05
"""Share of an engine's running requests preempted between two reports that counts as a storm."""
STREAK = 3
"""Reports or steps in a row before a warning."""


class Cause(enum.Enum):
    """Reason for which no new group starts when `max_waiting_batches` are full."""

    SCORES = "scores"
    TRAINER = "trainer"


@dataclass(slots=True)
class Streak:
    """Fires once when a condition has held `length` times in a row."""

    length: int = STREAK
    seen: int = 0

    def observe(self, condition: bool) -> bool:
        """Count one observation; True exactly when the streak reaches its length."""
        self.seen = self.seen + 1 if condition else 0
        return self.seen == self.length


class SchedulerWarnings:
    """Recomputation storm, queues that are empty or full."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        self._storms: dict[str, Streak] = {}
        self._underflow = Streak()
        self._held_back = {cause: Streak() for cause in Cause}
        self._causes: set[Cause | None] = set()

    def load(self, event: EngineLoad, running: int, in_flight: int) -> list[Warn]:
        """A load report of an engine with `running` requests, of `in_flight` in all."""
        storm = event.preemptions > max(1.0, PREEMPTED_SHARE * running)
        if not self._storms.setdefault(event.engine_id, Streak()).observe(storm):
            return []
        message = (
            f"engine {event.engine_id} preempted {event.preemptions} of {running} requests since "
            f"its last report, {in_flight} are in flight in all: N' is over the KV capacity; lower "
            "schedule.concurrency (or set it to auto), or raise engines.max_total_tokens"
        )
        return [Warn("recomputation_storm", message)]

    def engine_lost(self, engine_id: str) -> None:
        """Forget what was seen of an engine."""
        self._storms.pop(engine_id, None)

    def published(self, number: int, batch_waits: bool) -> list[Warn]:
        """Weights `number` are out and the trainer looks for its next batch."""
        if not self._config.overlap or not self._underflow.observe(not batch_waits):
            return []
        message = (
            f"the trainer found no batch ready for {STREAK} steps in a row up to step {number}: "
            "raise schedule.concurrency, add engines, or give the trainer fewer GPUs"
        )
        return [Warn("queue_underflow", message)]

    def new_groups(self, held_back_by: Cause | None) -> None:
        """New groups could start, or were blocked or dropped for this cause."""
        self._causes.add(held_back_by)

    def taken(self, step: int, unscored: int) -> list[Warn]:
        """The trainer took the batch of `step`; `unscored` responses wait for a score."""
        seen, self._causes = self._causes, set()
        if not seen:  # no slot was free for a new group in this step: it shows nothing
            return []
        sets_in = [cause for cause in Cause if self._held_back[cause].observe(cause in seen)]
        return [self._queue_warning(cause, step, unscored) for cause in sets_in]

    def _queue_warning(self, cause: Cause, step: int, unscored: int) -> Warn:
        if cause is Cause.SCORES:
            return Warn(
                "scoring_backlog",
                f"new groups were held back for {STREAK} steps in a row up to step {step} because "
                f"finished ones wait for their scores ({unscored} responses now): scoring is "
                "slower than generation; raise task.scorer_workers, or make the scorer faster",
            )
        return Warn(
            "queue_overflow",
            f"complete batches filled schedule.max_waiting_batches for {STREAK} steps in a row up "
            f"to step {step} (schedule.overflow: {self._config.overflow}): generation outruns "
            "training; lower schedule.concurrency, use fewer engines, or raise "
            "schedule.max_waiting_batches",
        )
