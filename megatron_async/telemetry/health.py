"""Named warnings from a run's own metrics: rules of one step, and growth over many.

Invariants
- A function of the metrics seen so far. The rules of one step are in `telemetry.learning`.
- Each is emitted once when it sets in, and again only after a step at which it did not hold. A step
  without the metric of a rule (one that was skipped) does not count for it.
- The thresholds of entropy and drift are assumed (no source gives numbers).
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Final

from megatron_async.telemetry.learning import PROBE, LearningWatch

ENTROPY_GROWTH = 1.5
"""Newest entropy over that of the window's first step that counts as growth without end."""
ENTROPY_WINDOW = 10
"""Steps of entropy that are looked at."""
DRIFT_STEPS = 5
"""Steps at either end of the run whose median error of engines' log-probs is compared."""
DRIFT_GROWTH = 2.0
"""Newest median over the first one that counts as drift: single steps differ by less."""
DRIFT_LEAST = 1e-3
"""Median error in nats below which nothing is drift: rounding in float32 stays far below."""


class HealthWatch:
    """Takes every step's metrics; returns what goes wrong. `holding`: names that hold now.

    `bound`: schedule.max_async_level; `before`: metrics of the steps before a resume, in order.
    """

    def __init__(
        self, bound: int | None = None, before: Iterable[Mapping[str, float]] = ()
    ) -> None:
        steps = list(before)
        self._learning = LearningWatch(bound, steps[-1] if steps else None)
        self._seen: dict[str, list[float]] = {metric: [] for _, metric, _ in _RULES}
        self._seen[PROBE] = [metrics[PROBE] for metrics in steps if PROBE in metrics]
        self.holding: frozenset[str] = frozenset()

    def step(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """(name, message) of each rule broken now that was not at the last step with its metric."""
        found = self._broken(metrics)
        held = self.holding
        unmeasured = self._learning.unmeasured(metrics)
        self.holding = frozenset(name for name, _ in found) | (held & unmeasured)
        return [(name, message) for name, message in found if name not in held]

    def _broken(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        found = self._learning.step(metrics)
        for name, metric, broken in _RULES:
            if metric in metrics:
                self._seen[metric].append(metrics[metric])
            if (message := broken(self._seen[metric])) is not None:
                found.append((name, message))
        return found


def entropy_growth(entropy: Sequence[float]) -> str | None:
    """A sentence when entropy rose at most steps of the window, by `ENTROPY_GROWTH` in all."""
    window = entropy[-ENTROPY_WINDOW:]
    if len(window) < ENTROPY_WINDOW or not all(map(math.isfinite, window)):
        return None
    rises = sum(later > earlier for earlier, later in itertools.pairwise(window))
    if rises < 0.8 * (len(window) - 1) or window[-1] < ENTROPY_GROWTH * max(window[0], 1e-6):
        return None
    return (
        f"entropy rose from {window[0]:.3f} to {window[-1]:.3f} nats in {ENTROPY_WINDOW} steps: "
        "stale data or clipping push the policy apart; lower schedule.max_async_level, tighten "
        "rejection, or lower the learning rate"
    )


def engine_drift(errors: Sequence[float]) -> str | None:
    """A sentence when engines and trainer differ more and more on tokens of equal weights."""
    if len(errors) < 2 * DRIFT_STEPS:
        return None
    first, newest = median(errors[:DRIFT_STEPS]), median(errors[-DRIFT_STEPS:])
    if newest < DRIFT_LEAST or newest < DRIFT_GROWTH * first:
        return None
    return (
        f"log-probs of engines and trainer differed by {first:.2g} at the start and by "
        f"{newest:.2g} nats now, with the same weights: stale weights or KV cache, or rounding "
        "that grows; see weights/probe_mean_error for the step and docs/weights.md for the causes"
    )


# name, metric, and the sentence for all its values so far if they break the rule
_RULES: Final[tuple[tuple[str, str, Callable[[Sequence[float]], str | None]], ...]] = (
    ("entropy_growth", "actor/entropy", entropy_growth),
    ("engine_drift", PROBE, engine_drift),
)
