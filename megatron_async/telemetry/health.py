"""Emits named warnings from a run's metrics: rules about one step, and about growth over many
steps.

Invariants
- The warnings are a function of the metrics seen so far. Rules about one step are in
  `telemetry.learning`.
- A warning is emitted once when its condition sets in, and again only after a step at which the
  condition did not hold. A step without the rule's metric (a skipped step) does not count.
- The thresholds of entropy and drift are assumed (no source gives numbers).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from megatron_async.telemetry.learning import PROBE, LearningWatch

ENTROPY_GROWTH = 1.5
"""Ratio of the newest entropy to that of the window's first step from which the growth is a
warning."""
ENTROPY_WINDOW = 10
"""Number of newest steps whose entropy is examined."""
DRIFT_STEPS = 5
"""Number of steps at the start and at the end of a run whose median log-prob errors are
compared."""
DRIFT_GROWTH = 2.0
"""Ratio of the newest median error to the first one from which it is drift: single steps
vary less."""
DRIFT_LEAST = 1e-3
"""Median error in nats below which there is no drift: rounding in float32 stays far below it."""


class HealthWatch:
    """Checks the metrics of every step and returns the warnings that set in.

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
        """Check the metrics of a step; return name and message of each warning that sets in with
        this step."""
        found = self._broken(metrics)
        previous = self.active
        unmeasured = self._learning.unmeasured(metrics)
        self.active = frozenset(name for name, _ in found) | (previous & unmeasured)
        return [(name, message) for name, message in found if name not in previous]

    def _broken(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """Record the metrics of a step; return name and message of each rule that they break."""
        found = self._learning.step(metrics)
        for name, metric, broken in _RULES:
            if metric in metrics:
                self._seen[metric].append(metrics[metric])
            if (message := broken(self._seen[metric])) is not None:
                found.append((name, message))
        return found


def entropy_growth(entropy: Sequence[float]) -> str | None:
    """Return a warning if the entropy grew over the newest steps; otherwise None.

    The entropy must have risen at 80 % of the window's steps, and by `ENTROPY_GROWTH` in all.

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
    """Return a warning if engines and trainer differ more in their log-probs than at the start, or
    None.

    Args:
        errors: Mean error, in nats, of the engines' log-probs of each step, with the trainer's
            weights.
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


# Name, metric, and a function that returns a warning if the metric's values so far break the rule.
_RULES: Final[tuple[tuple[str, str, Callable[[Sequence[float]], str | None]], ...]] = (
    ("entropy_growth", "actor/entropy", entropy_growth),
    ("engine_drift", PROBE, engine_drift),
)
