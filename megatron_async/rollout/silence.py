"""Silence as evidence: a pure account of the time that an engine had work and made no token.

Invariants
- An engine's silence grows only while it has requests, is not held, and no token of it waits for
  the store, behind which streams are not read. It is held while it is paused, receives weights or
  is verified, or has given its memory away. A first request, a token and the end of a hold begin it
  anew.
- A request's silence grows only while its engine is not held, reports an empty queue and none of
  its tokens waits for the store: a request that waits for room in the KV cache, or was sent back to
  the queue, is silent for a good reason.
- There is no clock here; every call carries the time, in seconds that never run backwards.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stopwatch:
    """Seconds in which it runs."""

    _seconds: float = 0.0
    _since: float | None = None

    def set(self, runs: bool, now: float) -> None:
        """Let it run, or stand still, from `now` on."""
        self._seconds = self.seconds(now)
        self._since = now if runs else None

    def zero(self, now: float) -> None:
        """Begin anew; it goes on running if it runs."""
        self._seconds = 0.0
        self._since = None if self._since is None else now

    def seconds(self, now: float) -> float:
        """Return the reading of the clock, in seconds."""
        return self._seconds + (0.0 if self._since is None else now - self._since)


class EngineWatch:
    """An engine's silence, and a clock for the silence of each of its requests."""

    def __init__(self) -> None:
        self.requests = 0
        self._holds: set[str] = set()
        self._released_at = float("-inf")
        self._queue_empty = False  # unknown until its first report
        self._storing = 0
        self._silence = Stopwatch()
        self._uncrowded = Stopwatch()

    @property
    def held(self) -> bool:
        """Return whether it cannot be expected to make tokens or to answer."""
        return bool(self._holds)

    def held_since(self, since: float) -> bool:
        """Return whether it was held at any time from `since` on."""
        return self.held or self._released_at >= since

    def silence(self, now: float) -> float:
        """Seconds for which it had requests, was not held, and made no token."""
        return self._silence.seconds(now)

    def request_clock(self, now: float) -> float:
        """A request has been silent for the difference of two readings."""
        return self._uncrowded.seconds(now)

    def hold(self, why: str, now: float) -> None:
        """Hold the engine from now on, until each `why` is released."""
        self._holds.add(why)
        self._update(now)

    def release(self, why: str, now: float) -> None:
        """Release one reason to hold; nothing when it is not held for `why`."""
        if why not in self._holds:
            return
        self._holds.remove(why)
        if not self._holds:
            self._released_at = now
            self._silence.zero(now)
        self._update(now)

    def request_began(self, now: float) -> None:
        """Count a request that is on its way to the engine."""
        self.requests += 1
        self._update(now)

    def request_ended(self, now: float) -> None:
        """Count a request that has ended; without any, the silence is over."""
        self.requests -= 1
        self._update(now)
        if not self.requests:
            self._silence.zero(now)

    def token(self, now: float) -> None:
        """Note that the engine made tokens."""
        self._silence.zero(now)

    def store_begins(self, now: float) -> None:
        """A stream waits until its tokens are stored."""
        self._storing += 1
        if self._storing == 1:
            self._update(now)

    def store_ends(self, now: float) -> None:
        """Let time count again."""
        self._storing -= 1
        if not self._storing:
            self._update(now)

    def queue(self, waiting: int, now: float) -> None:
        """Record how many requests the engine reports in its queue."""
        self._queue_empty = waiting == 0
        self._update(now)

    def _update(self, now: float) -> None:
        heard = not self.held and not self._storing
        self._silence.set(heard and self.requests > 0, now)
        self._uncrowded.set(heard and self._queue_empty, now)
