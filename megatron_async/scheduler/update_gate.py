"""Decides when weights may be sent to the engines, which must be idle or paused then.

Invariants
- `AllowUpdate` is emitted once for each requested update. With `weight_update: in_flight`,
  `PauseEngines` is emitted before it: directly before, or with `boundary: pause` when the batch is
  emitted. `AllowUpdate` is emitted only when no request runs, except if `weight_update: in_flight`
  is combined with `boundary: continue` or `boundary: pause`.
- From the request of an update to its publication nothing is submitted (`closed`).
- `ResumeEngines` follows the publication exactly when `PauseEngines` was emitted before it.
"""

import enum

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler.events import Action, AllowUpdate, PauseEngines, ResumeEngines


class Phase(enum.Enum):
    """Phase of the weight update: no update, waiting for running requests, or weights are being
    sent."""

    SERVING = enum.auto()
    PREPARING = enum.auto()
    UPDATING = enum.auto()


class UpdateGate:
    """Decides when a requested weight update may start, and whether engines are paused before it
    and resumed after it."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._pauses = config.weight_update == "in_flight"
        self._pauses_at_batch = config.boundary == "pause"
        self._needs_idle = not (self._pauses and config.boundary in ("continue", "pause"))
        self._paused = False
        self._mode: PauseEngines = PauseEngines("in_place" if config.in_place else "retract")
        self._phase = Phase.SERVING
        self._number = -1

    @property
    def closed(self) -> bool:
        """Whether an update was requested and its version is not published yet."""
        return self._phase is not Phase.SERVING

    def request(self, number: int) -> None:
        """Record that the trainer wants to publish version `number`."""
        if self._phase is Phase.UPDATING and number == self._number:
            return
        self._phase = Phase.PREPARING
        self._number = number

    def batch_emitted(self) -> list[Action]:
        """Return `PauseEngines` if running requests are paused when a batch is emitted."""
        return self._pause() if self._pauses_at_batch else []

    def _pause(self) -> list[Action]:
        """Return `PauseEngines`, or nothing if the engines are paused already."""
        was_paused, self._paused = self._paused, True
        return [] if was_paused else [self._mode]

    def ready(self, in_flight: int) -> list[Action]:
        """Return the actions that start the requested transfer of weights, or none if it may not
        start now.

        `in_flight` is the number of running requests.
        """
        if self._phase is not Phase.PREPARING or (self._needs_idle and in_flight):
            return []
        self._phase = Phase.UPDATING
        allow = AllowUpdate(self._number)
        return [*self._pause(), allow] if self._pauses else [allow]

    def published(self) -> list[Action]:
        """Record that the engines have new weights; return `ResumeEngines` if they were paused."""
        was_paused, self._paused = self._paused, False
        self._phase = Phase.SERVING
        return [ResumeEngines()] if was_paused else []
