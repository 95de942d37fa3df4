"""Emits named warnings about a run, by rules about the metrics of one step and about their growth
over many steps.

Invariants
- The warnings depend only on the metrics so far. The rules about one step are in
  `telemetry.learning`.
- A warning is emitted at the first step at which its condition holds. It is emitted again only if
  the condition did not hold at a step in between. A step without the metric of the rule, such as a
  skipped step, changes nothing.
- The thresholds of entropy and drift are assumed, because no source gives numbers.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from megatron_async.telemetry.learning import PROBE, LearningWatch

ENTROPY_GROWTH = 1.5
"""Smallest ratio of the entropy at the last step to the entropy at the first step of the window
that causes a warning."""
ENTROPY_WINDOW = 10
"""Number of newest steps whose entropy is examined."""
DRIFT_STEPS = 5
"""Number of steps at the start of a run, and of its newest steps, whose median log-prob errors are
compared."""
DRIFT_GROWTH = 2.0
"""Smallest ratio of the newest median error to the median error at the start that counts as drift.
Without drift, even the errors of single steps vary by less."""
DRIFT_LEAST = 1e-3
"""Median error in nats below which nothing counts as drift. With float32, rounding errors are far
smaller."""


class HealthWatch:
    """Checks the metrics of every step and returns the warnings whose conditions start to hold.

    Attributes:
        active: Names of the warnings whose conditions hold now.
    """

    def __init__(
        self, bound: int | None = None, before: Iterable[Mapping[str, float]] = ()
    ) -> None:
        """Start from the metrics of the steps before a resume.

        Args:
            bound: The setting schedule.max_async_level; None or 0 means no staleness bound.
            before: Metrics of the steps before a resume, in order.
        """
        steps = list(before)
        self._learning = LearningWatch(bound, steps[-1] if steps else None)
        self._seen: dict[str, list[float]] = {metric: [] for _, metric, _ in _RULES}
        self._seen[PROBE] = [metrics[PROBE] for metrics in steps if PROBE in metrics]
        self.active: frozenset[str] = frozenset()

    def step(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Check the metrics of a step; return name and message of each warning whose condition
        holds now and did not hold at the last step that had its metrics."""
        found = self._broken(metrics)
        previous = self.active
        unmeasured = self._learning.unmeasured(metrics)
        self.active = frozenset(name for name, _ in found) | (previous & unmeasured)
        return [(name, message) for name, message in found if name not in previous]

    def _broken(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Record the metrics of a step; return name and message of each warning whose condition
        holds."""
        found = self._learning.step(metrics)
        for name, metric, broken in _RULES:
            if metric in metrics:
                self._seen[metric].append(metrics[metric])
            if (message := broken(self._seen[metric])) is not None:
                found.append((name, message))
        return found


def entropy_growth(entropy: Sequence[float]) -> str | None:
    """Return a warning if the entropy grew over the newest steps; otherwise None.

    In the window of the newest `ENTROPY_WINDOW` steps, the entropy must have risen from step to
    step in at least 80 % of the cases, and at least by the factor `ENTROPY_GROWTH` in total.

    Args:
        entropy: The entropy of each step so far, in nats.
    """
    window = entropy[-ENTROPY_WINDOW:]
    if len(window) < ENTROPY_WINDOW or not all(map(math.isfinite, window)):
        return None
    rises = sum(later > earlier for earlier, later in itertools.pairwise(window))
    if rises < 0.8 * (len(window) - 1) or window[-1] < ENTROPY_GROWTH * max(window[0], 1e-6):
        return None
    return (
        f"entropy rose from {window[0]:.3f} to {window[-1]:.3f} nats in {ENTROPY_WINDOW} steps: "
        "stale data or clipping make the policy ever more random. Lower schedule.max_async_level, "
        "tighten rejection, or lower the learning rate"
    )


def engine_drift(errors: Sequence[float]) -> str | None:
    """Return a warning if the log-probs of engines and trainer differ `DRIFT_GROWTH` times as much
    as at the start of the run, or more; otherwise None.

    Args:
        errors: For each step so far at which it was measured, the mean absolute difference, in
            nats, between the log-probs of engines and trainer with the same weights.
    """
    if len(errors) < 2 * DRIFT_STEPS:
        return None
    first, newest = median(errors[:DRIFT_STEPS]), median(errors[-DRIFT_STEPS:])
    if newest < DRIFT_LEAST or newest < DRIFT_GROWTH * first:
        return None
    return (
        f"log-probs of engines and trainer differed by {first:.2g} at the start and by "
        f"{newest:.2g} nats now, with the same weights: stale weights or KV cache, or growing "
        "rounding errors. See weights/probe_mean_error for the step, docs/weights.md for the causes"
    )


# Rules about many steps: name of the warning, metric, and a function from the metric's values so
# far to the warning or None.
_RULES: Final[tuple[tuple[str, str, Callable[[Sequence[float]], str | None]], ...]] = (
    ("entropy_growth", "actor/entropy", entropy_growth),
    ("engine_drift", PROBE, engine_drift),
)
