"""Defines the faults of the fault program and draws random sequences of faults.

All functions are pure.

Invariants
- The same seed gives the same sequence, independently of the results of earlier runs.
- The table of kinds alone decides what a check excuses: whether an engine with a fault of this kind
  still counts as healthy, and whether such a fault may end the run, which is then resumed.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Edge = Literal["engine", "trainer", "manager", "scorer", "disk", "clock", "run", "environment"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: Name of the kind.
        edge: Part of the run that fails.
        seconds: Range from which the duration of a fault is drawn.
        count: Range from which the number of repetitions of a fault is drawn.
        sick: Whether the manager may replace an engine because of one such fault.
        ends: Whether the run may end because of the fault, with an error message.
        requests: Whether the fault spoils `count` requests of a healthy engine. The manager may
            replace the engine once `TOLERATED` of its requests have failed.
        anew: Whether the fault costs an episode, which restarts from scratch.
    """

    name: str
    edge: Edge
    seconds: tuple[float, float] = (0.0, 0.0)
    count: tuple[int, int] = (1, 1)
    sick: bool = False
    ends: bool = False
    requests: bool = False
    anew: bool = False


TOLERATED = 3
"""Number of prompts whose requests must fail in a row before the manager replaces an engine."""
FOR_GOOD = 1e6
"""Seconds of a fault that does not end by itself."""
SILENCE_SECONDS = 3.0
"""Seconds without a sign of life after which an engine counts as hung; durations depend on it."""
_SHORT = (0.1, 0.4 * SILENCE_SECONDS)
_PAUSE = (0.3, 1.5 * SILENCE_SECONDS)
_LONG = (3.0 * SILENCE_SECONDS, 4.0 * SILENCE_SECONDS)  # Longer than a weight update may take.
_FOR_GOOD = (FOR_GOOD, FOR_GOOD)

_ALL = (
    Kind("engine hangs", "engine", _FOR_GOOD, sick=True),
    Kind("engine hangs for a moment", "engine", _SHORT),
    Kind("engine answers late", "engine", (0.5, 3.0)),
    Kind("engine answers garbage", "engine", count=(1, 8), sick=True),
    Kind("engine refuses requests", "engine", count=(1, 2)),
    Kind("engine answers 5xx", "engine", count=(1, 2), requests=True),
    Kind("engine answers nothing but 5xx", "engine", _FOR_GOOD, sick=True),
    Kind("engine drops streams", "engine", count=(1, 3), requests=True),
    Kind("engine restarts with old weights", "engine", sick=True),
    Kind("engine holds another version than it reports", "engine", count=(1, 2), sick=True),
    Kind("engine dies", "engine", sick=True),
    Kind("trainer pauses", "trainer", _PAUSE),
    Kind("trainer pauses for long", "trainer", _LONG),
    Kind("trainer restarts", "trainer"),
    Kind("manager pauses", "manager", _PAUSE),
    Kind("scorer hangs", "scorer"),
    Kind("scorer floods its output", "scorer"),
    Kind("scorer forks", "scorer"),
    Kind("scorer eats memory", "scorer"),
    Kind("scorer dies", "scorer"),
    Kind("disk is slow", "disk", (0.5, 3.0)),
    Kind("disk hangs at fsync", "disk", _PAUSE),
    Kind("disk is full", "disk", (0.2, 1.0), ends=True),
    Kind("disk is read-only", "disk", (0.2, 1.0), ends=True),
    Kind("clock jumps ahead", "clock", (60.0, 86_400.0)),
    Kind("clock jumps back", "clock", (60.0, 86_400.0)),
    Kind("second run", "run"),
    Kind("environment raises", "environment", anew=True),
    Kind("environment hangs", "environment", anew=True),
    Kind("environment returns the wrong type", "environment", anew=True),
    Kind("environment floods", "environment", anew=True),
    Kind("environment eats memory", "environment", anew=True),
    Kind("environment forks", "environment"),
    Kind("environment blocks its loop", "environment"),
    Kind("environment dies", "environment"),
    Kind("environment worker dies", "environment"),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True)
class Fault:
    """A fault that is to be injected.

    Attributes:
        kind: Name of its kind.
        after: Seconds between the fault before and this fault.
        seconds: Duration in seconds.
        count: Number of repetitions.
        target: Selects the object that fails: the index modulo the number of objects.
    """

    kind: str
    after: float = 0.0
    seconds: float = 0.0
    count: int = 1
    target: int = 0

    def __str__(self) -> str:
        extent = "" if self.seconds in (0.0, FOR_GOOD) else f" for {self.seconds:.1f} s"
        times = "" if self.count == 1 else f" {self.count} times"
        return f"{self.kind}{extent}{times}"


def kinds_at(*edges: Edge) -> tuple[str, ...]:
    """Return the names of the kinds of faults at these parts of a run."""
    return tuple(kind.name for kind in _ALL if kind.edge in edges)


def sequence(
    seed: int | str, count: int, kinds: Collection[str], gap: tuple[float, float] = (0.05, 0.5)
) -> tuple[Fault, ...]:
    """Draw `count` faults from `seed`; every one of `kinds` is used before a kind is repeated.

    Args:
        seed: Seed of the random choice.
        count: Number of faults.
        kinds: Names of the kinds to draw from.
        gap: Range from which the seconds between two faults are drawn.
    """
    order = random.Random(f"order {seed}")
    names: list[str] = []
    while len(names) < count:
        names += order.sample(sorted(kinds), len(kinds))
    rng = random.Random(f"faults {seed}")
    return tuple(_drawn(rng, KINDS[name], gap) for name in names[:count])


def _drawn(rng: random.Random, kind: Kind, gap: tuple[float, float]) -> Fault:
    low, high = kind.seconds
    return Fault(
        kind.name,
        after=round(rng.uniform(*gap), 3),
        seconds=low if low == high else round(rng.uniform(low, high), 3),
        count=rng.randint(*kind.count),
        target=rng.randrange(1 << 16),
    )


@dataclass(frozen=True)
class Injected:
    """A fault that was injected.

    Attributes:
        kind: Name of its kind.
        engine: Address of the engine that failed; "" if no engine failed.
        count: Number of repetitions.
        at: Seconds since the start of the run.
    """

    kind: str
    engine: str = ""
    count: int = 1
    at: float = 0.0


def excused(injected: Sequence[Injected], engine: str) -> bool:
    """Return whether the faults of the engine at this address explain that it was replaced."""
    own = [one for one in injected if one.engine == engine]
    failed = sum(one.count for one in own if KINDS[one.kind].requests)
    return failed >= TOLERATED or any(KINDS[one.kind].sick for one in own)


def may_end(injected: Sequence[Injected]) -> bool:
    """Return whether a run may have ended because of these faults."""
    return any(KINDS[one.kind].ends for one in injected)
