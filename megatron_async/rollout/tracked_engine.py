"""State of an engine as its driver sees it: serving or not, version held, reasons to wait.

Tokens are accepted by policy version: an engine may generate as soon as it has been sent a version,
so that it does not idle while the trainer verifies it. What it generates meanwhile waits here, in
the order in which it came; if the verification fails, the streams are canceled and nothing of it
was kept (docs/weights.md).

Invariants
- The slot is informed when anybody pauses or resumes an engine through its client: silence of an
  engine that is held is not counted, and what cannot work on a held engine waits for its release.
- A slot that was given up never comes back; a restarted or stale engine gets a new one.
- Tokens of a version are accepted once the engine is verified for it, and until
  then it counts as held: they are read no further.
- No token passes under a version that the engine was not sent, or that has not been verified there.
- Only the newest versions that were verified are known: no stream is so far behind.
- Whoever waits is let through by `accept`, or gets False when the engine is given up.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

from megatron_async.engines.interface import EngineClient, ForwardingClient, PauseMode
from megatron_async.rollout.engine_health import EngineHealth
from megatron_async.trajectory.types import PolicyVersion

_PAUSE = "pause"
_UPDATE = "update"
_CHECK = "check"
_VERSIONS: Final = 64


class TrackedEngine:
    """An engine as the driver sees it; `up` once it holds the current weights.

    `preemptions_seen` is None until its first report: what it counted for somebody else before (a
    trainer that was lost, an update that it missed) is no news. `check` is the question whether it
    is alive.
    """

    def __init__(self, client: EngineClient, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.health = EngineHealth()
        self.client: EngineClient = _WatchedClient(client, self)
        self.up = False
        self.preemptions_seen: int | None = None
        self.check: asyncio.Task[None] | None = None
        self.given_up = False
        self._released = asyncio.Event()
        self._accepted: dict[PolicyVersion, None] = {}  # the oldest first
        self._expected: PolicyVersion | None = None
        self._verified = asyncio.Event()

    @property
    def engine_id(self) -> str:
        return self.client.engine_id

    def suspend(self, why: str = _UPDATE) -> None:
        """Expect nothing of the engine until `release`."""
        self.health.suspend(why, self.clock())
        self._released.clear()

    def release(self, why: str = _UPDATE) -> None:
        """Whoever held it for `why` is done."""
        self.health.release(why, self.clock())
        if not self.health.suspended:
            self._released.set()

    def await_verification(self, version: PolicyVersion) -> None:
        """Hold back tokens of this version, which the engine was sent, until it is verified."""
        if version not in self._accepted:
            self._expected = version
            self._verified.clear()
            self.suspend(_CHECK)

    def accept(self) -> None:
        """Accept tokens of the version that the engine was sent last: it is verified."""
        if self._expected is not None:
            self._accepted[self._expected] = None
            if len(self._accepted) > _VERSIONS:
                del self._accepted[next(iter(self._accepted))]
            self._verified.set()
        self.release(_CHECK)

    def give_up(self) -> None:
        """Mark the engine as out of service, and release all waits for its verification."""
        self.given_up = True
        self._expected = None
        self._verified.set()
        self._released.set()

    async def wait_accepted(self, version: PolicyVersion) -> bool:
        """Wait until tokens of `version` are accepted; return False if they never will be."""
        if version == self._expected and version not in self._accepted:
            await self._verified.wait()
        return version in self._accepted

    async def until_released(self) -> None:
        """Returns at once unless it is held. A hold is limited by who holds it."""
        while self.health.suspended and not self.given_up:
            await self._released.wait()


class _WatchedClient(ForwardingClient):
    """A client that informs the slot of every pause and its end."""

    def __init__(self, client: EngineClient, tracked: TrackedEngine) -> None:
        super().__init__(client)
        self._tracked = tracked

    async def pause(self, mode: PauseMode) -> None:
        self._tracked.suspend(_PAUSE)  # first: from the call on it may stand still
        await super().pause(mode)

    async def resume(self) -> None:
        await super().resume()
        self._tracked.release(_PAUSE)
