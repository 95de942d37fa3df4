"""Named warnings from a run's own metrics: the correction guide's rules, ESS collapse, entropy.

Invariants
- A function of the metrics seen so far; the rules themselves live where they are defined
  (`algorithms.metrics`, `scheduler.warnings`).
- Each is said once when it sets in, and again only after a step at which it did not hold. A step
  without the metric of a rule (one that was skipped) says nothing about it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from megatron_async.algorithms.metrics import health_warnings, unjudged_rules
from megatron_async.scheduler.warnings import entropy_growth, ess_collapse

_REMEMBERED_STEPS = 64


class HealthWatch:
    """Feed it every step's metrics; it says what goes wrong."""

    def __init__(self) -> None:
        self._ess: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._entropy: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._holding: frozenset[str] = frozenset()

    def step(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        """(name, message) of each rule broken here that was not at the last step to tell of it."""
        found = self._broken(metrics)
        held = self._holding
        self._holding = frozenset(name for name, _ in found) | (held & unjudged_rules(metrics))
        return [(name, message) for name, message in found if name not in held]

    def _broken(self, metrics: Mapping[str, float]) -> list[tuple[str, str]]:
        found = [(warning.rule, warning.message) for warning in health_warnings(metrics)]
        if "off_policy/ess" in metrics:
            self._ess.append(metrics["off_policy/ess"])
        if "actor/entropy" in metrics:
            self._entropy.append(metrics["actor/entropy"])
        for warning in (ess_collapse(list(self._ess)), entropy_growth(list(self._entropy))):
            if warning is not None:
                found.append((warning.name, warning.message))
        return found
