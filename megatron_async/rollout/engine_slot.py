"""State of an engine as its driver sees it: serving or not, version held, reasons to wait.

Tokens pass a gate by policy version: an engine may generate as soon as it has been sent a version,
so that it does not idle while the trainer verifies it. What it generates meanwhile waits here, in
the order in which it came; if the verification fails, the streams are cancelled and nothing of it
was kept (docs/weights.md).

Invariants
- The slot is informed when anybody pauses or resumes an engine through its client: silence of an
  engine that is held is not counted, and what cannot work on a held engine waits for its release.
- A slot that was given up never comes back; a restarted or stale engine gets a new one.
- Tokens of a version are accepted once the engine is verified for it, and until
  then it counts as held: they are read no further.
- No token passes under a version that the engine was not sent, or that has not been verified there.
- Whoever waits is let through by `accept`, or gets False when the engine is given up.
- An engine's silence grows only while it has requests, is not held, and no token of it waits for
  the store, behind which streams are not read. It is held while it is paused, receives weights or
  is verified, or has given its memory away. A first request, a token and the end of a hold begin it
  anew.
- A request's silence grows only while its engine is not held, reports an empty queue and none of
  its tokens waits for the store: a request that waits for room in the KV cache, or was sent back to
  the queue, is silent for a good reason.
- `EngineWatch` has no clock: every call carries the time, in seconds that never run backwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from megatron_async.engines.interface import EngineClient, ForwardingClient, PauseMode
from megatron_async.trajectory.types import PolicyVersion

_PAUSE = "pause"
_UPDATE = "update"
_CHECK = "check"


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
        self._update(now)

    def store_ends(self, now: float) -> None:
        """Let time count again."""
        self._storing -= 1
        self._update(now)

    def queue(self, waiting: int, now: float) -> None:
        """Record how many requests the engine reports in its queue."""
        self._queue_empty = waiting == 0
        self._update(now)

    def _update(self, now: float) -> None:
        heard = not self.held and not self._storing
        self._silence.set(heard and self.requests > 0, now)
        self._uncrowded.set(heard and self._queue_empty, now)


class VersionGate:
    """A gate for one engine, made anew when it is sent weights again after a failed check."""

    def __init__(self) -> None:
        self._accepted: set[PolicyVersion] = set()
        self._expected: PolicyVersion | None = None
        self._open = asyncio.Event()

    @property
    def closed(self) -> bool:
        """Return whether tokens of the newest version wait for its verification."""
        return self._expected is not None and self._expected not in self._accepted

    def expect(self, version: PolicyVersion) -> None:
        """The engine was sent this version; its tokens wait from now on."""
        if version not in self._accepted:
            self._expected = version
            self._open.clear()

    def accept(self) -> None:
        """Open for the version that was sent last: it is verified."""
        if self._expected is not None:
            self._accepted.add(self._expected)
            self._open.set()

    def give_up(self) -> None:
        """The engine is given up: nobody waits for its verification any more."""
        self._expected = None
        self._open.set()

    async def passes(self, version: PolicyVersion) -> bool:
        """True once tokens of `version` are accepted; False if they never will be."""
        if version == self._expected and version not in self._accepted:
            await self._open.wait()
        return version in self._accepted


class EngineSlot:
    """An engine as the driver sees it; `up` once it holds the current weights.

    `preemptions_seen` is None until its first report: what it counted for somebody else before (a
    trainer that was lost, an update that it missed) is no news. `failed_prompts` are the groups
    whose requests failed on it since its last token. `check` is the question whether it is alive.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.watch = EngineWatch()
        self.client: EngineClient = _WatchedClient(client, self)
        self.up = False
        self.preemptions_seen: int | None = None
        self.failed_prompts: set[int] = set()
        self.check: asyncio.Task[None] | None = None
        self.given_up = False
        self.gate = VersionGate()
        self._released = asyncio.Event()

    @property
    def engine_id(self) -> str:
        return self.client.engine_id

    def hold(self, why: str = _UPDATE) -> None:
        """Expect nothing of the engine until `release`."""
        self.watch.hold(why, self.clock())
        self._released.clear()

    def release(self, why: str = _UPDATE) -> None:
        """Whoever held it for `why` is done."""
        self.watch.release(why, self.clock())
        if not self.watch.held:
            self._released.set()

    def expect(self, version: PolicyVersion) -> None:
        """Hold back tokens of this version, which the engine was sent, until it is verified."""
        self.gate.expect(version)
        if self.gate.closed:
            self.hold(_CHECK)

    def accept(self) -> None:
        """Accept tokens of the version that the engine was sent last: it is verified."""
        self.gate.accept()
        self.release(_CHECK)

    def give_up(self) -> None:
        """Mark the engine as serving no more; whoever waits for its release goes on."""
        self.given_up = True
        self.gate.give_up()
        self._released.set()

    async def until_released(self) -> None:
        """Returns at once unless it is held. A hold is limited by who holds it."""
        while self.watch.held and not self.given_up:
            await self._released.wait()


class _WatchedClient(ForwardingClient):
    """A client that informs the slot of every pause and its end."""

    def __init__(self, client: EngineClient, slot: EngineSlot) -> None:
        super().__init__(client)
        self._slot = slot

    async def pause(self, mode: PauseMode) -> None:
        self._slot.hold(_PAUSE)  # first: from the call on it may stand still
        await super().pause(mode)

    async def resume(self) -> None:
        await super().resume()
        self._slot.release(_PAUSE)
