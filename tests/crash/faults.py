"""What the fault program does to a run, and random sequences of it. Pure.

Invariants
- The same seed gives the same sequence, whatever has become of the runs before it.
- A kind defines whether an engine that has it is still healthy, and whether a run may end by
  it (and is then resumed). What a checker excuses follows from that table and from nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Edge = Literal["engine", "trainer", "manager", "scorer", "disk", "clock", "run", "environment"]


@dataclass(frozen=True)
class Kind:
    """One way in which something fails.

    `seconds`, `count`: the ranges that a fault's own are drawn from. `sick`: an engine that has it
    may be given up. `ends`: the run may end by it with a sentence. `requests`: it spoils that many
    requests of a healthy engine, which may be given up once it has failed `TOLERATED` of them.
    `anew`: it costs an episode, which begins again.
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
"""Requests of so many prompts in a row may fail on an engine before it is given up."""
FOR_GOOD = 1e6
"""Seconds of what does not end by itself."""

# Seconds are those of runs whose limit for a silent engine is `SILENCE_SECONDS`.
SILENCE_SECONDS = 3.0
_SHORT = (0.1, 0.4 * SILENCE_SECONDS)
_PAUSE = (0.3, 1.5 * SILENCE_SECONDS)
_LONG = (3.0 * SILENCE_SECONDS, 4.0 * SILENCE_SECONDS)  # than an update may take
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
    """One fault: `after` seconds from the one before it, at the `target`-th of what it can hit."""

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
    """Names of what can fail there."""
    return tuple(kind.name for kind in _ALL if kind.edge in edges)


def sequence(
    seed: int | str, count: int, kinds: Collection[str], gap: tuple[float, float] = (0.05, 0.5)
) -> tuple[Fault, ...]:
    """`count` faults; every one of `kinds` comes before any comes again."""
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
    """A fault that a run had; `engine`: the address of the engine that it hit, or ""."""

    kind: str
    engine: str = ""
    count: int = 1
    at: float = 0.0


def excused(injected: Sequence[Injected], engine: str) -> bool:
    """Whether what was done to the engine at this address explains that it was given up."""
    own = [one for one in injected if one.engine == engine]
    failed = sum(one.count for one in own if KINDS[one.kind].requests)
    return failed >= TOLERATED or any(KINDS[one.kind].sick for one in own)


def may_end(injected: Sequence[Injected]) -> bool:
    """Whether a run may have ended by what was done to it."""
    return any(KINDS[one.kind].ends for one in injected)
