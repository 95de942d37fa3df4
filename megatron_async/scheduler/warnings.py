"""Warns about preempted requests and about queues that stay empty or full, with one rule for each
failure that papers on asynchronous RL describe.

`telemetry.health` has the warnings that are based on the trainer's metrics.

Invariants
- A warning is emitted when its condition has held `STREAK` times in a row. It is emitted again only
  if the condition fails in between and then holds `STREAK` times in a row again.
- The thresholds are assumed, since no source gives numbers. Each is a named constant.
"""

import enum
from dataclasses import dataclass

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler.events import EngineLoad, Warn

PREEMPTED_SHARE = 0.05
"""Share of an engine's running requests above which the preemptions between two load reports count
as a storm; a single preemption never does."""
STREAK = 3
"""Number of load reports or training steps in a row in which a condition must hold before a warning
is emitted."""


class Cause(enum.Enum):
    """Reason why no new group starts when finished groups fill `max_waiting_batches`: slow scores
    or slow training."""

    SCORES = "scores"
    TRAINER = "trainer"


@dataclass(slots=True)
class Streak:
    """Counts how many times in a row a condition was observed."""

    length: int = STREAK
    seen: int = 0

    def observe(self, condition: bool) -> bool:
        """Count one observation; return True exactly when the condition has held `length` times in
        a row."""
        self.seen = self.seen + 1 if condition else 0
        return self.seen == self.length


class SchedulerWarnings:
    """Emits warnings about preempted requests, and about queues that stay empty or full."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        self._storms: dict[str, Streak] = {}
        self._underflow = Streak()
        self._held_back = {cause: Streak() for cause in Cause}
        self._causes: set[Cause | None] = set()

    def load(self, event: EngineLoad, running: int, in_flight: int) -> list[Warn]:
        """Check the load report of an engine; return a warning if it preempts too many requests.

        Args:
            event: The report.
            running: Number of requests that run on the engine.
            in_flight: Number of requests that run on all engines.
        """
        storm = event.preemptions > max(1.0, PREEMPTED_SHARE * running)
        if not self._storms.setdefault(event.engine_id, Streak()).observe(storm):
            return []
        message = (
            f"engine {event.engine_id} preempted {event.preemptions} of {running} requests since "
            f"its last report; {in_flight} requests are in flight on all engines. This exceeds "
            "the KV cache. Lower schedule.concurrency (or set it to auto), or raise "
            "engines.max_total_tokens."
        )
        return [Warn("recomputation_storm", message)]

    def engine_lost(self, engine_id: str) -> None:
        """Forget the reports of an engine that is down."""
        self._storms.pop(engine_id, None)

    def published(self, number: int, batch_waits: bool) -> list[Warn]:
        """Return a warning if, with `overlap`, no batch was ready for the trainer when it published
        a version, `STREAK` versions in a row.

        `number` is the version that it has published just now, and `batch_waits` is whether an
        emitted batch waits for it now.
        """
        if not self._config.overlap or not self._underflow.observe(not batch_waits):
            return []
        message = (
            f"the trainer found no batch ready for {STREAK} steps in a row up to step {number}. "
            "Raise schedule.concurrency, add engines, or give the trainer fewer GPUs."
        )
        return [Warn("queue_underflow", message)]

    def new_groups(self, held_back_by: Cause | None) -> None:
        """Record for which cause new groups may not start at the moment (`held_back_by`), or that
        they may (None)."""
        self._causes.add(held_back_by)

    def taken(self, step: int, unscored: int) -> list[Warn]:
        """Return a warning for each cause that has kept new groups from starting in `STREAK` steps
        in a row.

        Args:
            step: Step of the batch that the trainer has taken just now.
            unscored: Number of responses that wait for a score.
        """
        seen, self._causes = self._causes, set()
        # In this step no request was free for a new group, so the step shows nothing about the
        # causes.
        if not seen:
            return []
        sets_in = [cause for cause in Cause if self._held_back[cause].observe(cause in seen)]
        return [self._queue_warning(cause, step, unscored) for cause in sets_in]

    def _queue_warning(self, cause: Cause, step: int, unscored: int) -> Warn:
        if cause is Cause.SCORES:
            return Warn(
                "scoring_backlog",
                f"no new groups started for {STREAK} steps in a row up to step {step}, because "
                f"finished groups wait for scores ({unscored} responses now): scoring is slower "
                "than generation. Raise task.scorer_workers, or make the scorer faster.",
            )
        return Warn(
            "queue_overflow",
            f"complete batches filled schedule.max_waiting_batches for {STREAK} steps in a row up "
            f"to step {step} (schedule.overflow: {self._config.overflow}): generation is faster "
            "than training. Lower schedule.concurrency, use fewer engines, or raise "
            "schedule.max_waiting_batches.",
        )
