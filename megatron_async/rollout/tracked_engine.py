"""Provides the driver's state of one engine: whether it serves, why it is suspended, and which
versions' tokens are accepted.

Tokens are accepted by policy version. An engine may generate as soon as it has been sent a version,
so that it does not idle while the trainer verifies the version. Its tokens wait meanwhile, in the
order in which they arrived. If the verification fails, the streams are canceled and none of the
tokens is stored (docs/weights.md).

Invariants
- `TrackedEngine.client` records each pause and resume. A suspended engine need not make tokens or
  reply: its silence is not counted, and calls that it could not carry out wait until it is
  released.
- The state of an engine that was taken out of service is never used again; a restarted or stale
  engine gets a new object.
- Tokens of a version are accepted once the engine is verified for the version. Until then the
  engine's liveness checks are suspended and its streams are read no further.
- Tokens of a version that the engine was not sent, or that was not verified on it, are never
  accepted.
- Only the newest `_VERSIONS` verified versions are remembered, because no running request has
  tokens of a version as old as the forgotten ones.
- A caller that waits for a verification continues when `accept` is called, or gets False when the
  engine is taken out of service.
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
    """A rollout driver's state of one engine: whether it serves, whether it is suspended, and which
    versions' tokens are accepted.

    Attributes:
        client: Client of the engine, which suspends and releases this object when it pauses and
            resumes the engine.
        up: Whether the engine has loaded the current weights and serves requests.
        preemptions_seen: Total number of preemptions in the engine's last load report, which is
            subtracted from the next report's to count new ones; None before the first report.
        check: Running or last check of whether the engine replies; None if there was none.
        given_up: Whether the engine was taken out of service.
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
        self._accepted: dict[PolicyVersion, None] = {}  # Verified versions, oldest first.
        self._expected: PolicyVersion | None = None
        self._verified = asyncio.Event()

    @property
    def engine_id(self) -> str:
        return self.client.engine_id

    def suspend(self, why: str = _UPDATE) -> None:
        """Suspend liveness checks of this engine until `release` is called with the same reason
        `why`."""
        self.health.suspend(why, self.clock())
        self._released.clear()

    def release(self, why: str = _UPDATE) -> None:
        """Remove the reason `why` for which this engine is suspended; wake waiting callers if no
        reason remains."""
        self.health.release(why, self.clock())
        if not self.health.suspended:
            self._released.set()

    def await_verification(self, version: PolicyVersion) -> None:
        """Hold back tokens of `version`, which was sent to this engine, until `accept` is called.

        Do nothing if the version was verified on this engine before.
        """
        if version not in self._accepted:
            self._expected = version
            self._verified.clear()
            self.suspend(_CHECK)

    @property
    def unverified(self) -> bool:
        """Whether tokens of the version that was last sent to this engine are held back."""
        return self._expected is not None and self._expected not in self._accepted

    def accept(self) -> None:
        """Accept tokens of the version that was last sent to this engine, because the version is
        verified."""
        if self._expected is not None:
            self._accepted[self._expected] = None
            if len(self._accepted) > _VERSIONS:
                del self._accepted[next(iter(self._accepted))]
            self._verified.set()
        self.release(_CHECK)

    def give_up(self) -> None:
        """Mark this engine as out of service, and wake every caller that waits for its verification
        or release."""
        self.given_up = True
        self._expected = None
        self._verified.set()
        self._released.set()

    async def wait_accepted(self, version: PolicyVersion) -> bool:
        """Wait until `version` is verified on this engine, so that tokens it generated with
        `version` are accepted. Return False if that will never happen."""
        if version == self._expected and self.unverified:
            await self._verified.wait()
        return version in self._accepted

    async def until_released(self) -> None:
        """Wait until this engine is no longer suspended, or is taken out of service.

        There is no time limit here, because each caller of `suspend` limits the time of its
        suspension.
        """
        while self.health.suspended and not self.given_up:
            await self._released.wait()


class _WatchedClient(ForwardingClient):
    """Engine client that suspends its `TrackedEngine` on each pause and releases it on each
    resume."""

    def __init__(self, client: EngineClient, tracked: TrackedEngine) -> None:
        super().__init__(client)
        self._tracked = tracked

    async def pause(self, mode: PauseMode) -> None:
        # Before the call, because the engine may stop replying during it.
        self._tracked.suspend(_PAUSE)
        await super().pause(mode)

    async def resume(self) -> None:
        await super().resume()
        self._tracked.release(_PAUSE)
