"""Measures how the trainer spends the time of a step."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron_async.telemetry.metrics import TRAINER_PHASES


class StepTimes:
    """Seconds that the trainer has spent in each phase of `TRAINER_PHASES` since the last step.

    If a phase is measured inside another one, its time counts only for itself, so that the times
    add up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = {metric: 0.0 for _, metric in TRAINER_PHASES}
        self._running: list[str] = []
        self._counted_until = 0.0

    @contextmanager
    def measure(self, metric: str) -> Iterator[None]:
        """Count the time of this context for the phase with this metric."""
        self._count()
        self._running.append(metric)
        try:
            yield
        finally:
            self._count()
            self._running.pop()

    def _count(self) -> None:
        """Count the time since the last call for the innermost running phase."""
        now = self._clock()
        if self._running:
            self._seconds[self._running[-1]] += now - self._counted_until
        self._counted_until = now

    def take(self) -> dict[str, float]:
        """Return the metric of each phase in seconds, and their sum `time/step`; then count from
        zero. Call this when no phase is measured."""
        times, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return {**times, "time/step": sum(times.values())}
