"""State of an engine as its driver sees it: serving or not, version held, reasons to wait.

Invariants
- The slot is informed when anybody pauses or resumes an engine through its client: silence of an
  engine that is held is not counted, and what cannot work on a held engine waits for its release.
- A slot that was given up never comes back; a restarted or stale engine gets a new one.
- Tokens of a version are accepted once the engine is verified for it (`version_gate.py`), and until
  then it counts as held: they are read no further.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from megatron_async.engines.forwarding import ForwardingClient
from megatron_async.engines.interface import EngineClient, PauseMode
from megatron_async.rollout.silence import EngineWatch
from megatron_async.rollout.version_gate import VersionGate
from megatron_async.trajectory.types import PolicyVersion

_PAUSE = "pause"
_UPDATE = "update"
_CHECK = "check"


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
        self.version: PolicyVersion | None = None
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
