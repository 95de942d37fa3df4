"""The weight update as the scheduler sees it: engines are made ready, then weights change.

Invariants
- `AllowUpdate` is emitted once for each request. With `weight_update: in_flight`, `PauseEngines`
  comes before it. Unless `in_flight` is combined with `boundary: continue`, it waits until no
  request runs.
- Between the request and the publication nothing is submitted (`closed`).
- `ResumeEngines` follows the publication exactly when `PauseEngines` was emitted before.
"""

import enum

from megatron_async.config.schedule import ScheduleConfig
from megatron_async.scheduler.events import Action, AllowUpdate, PauseEngines, ResumeEngines


class Phase(enum.Enum):
    """Serving requests, being made ready for a transfer, or taking one."""

    SERVING = enum.auto()
    PREPARING = enum.auto()
    UPDATING = enum.auto()


class UpdateGate:
    """State of the weight update."""

    def __init__(self, config: ScheduleConfig) -> None:
        self._pauses = config.weight_update == "in_flight"
        self._needs_idle = not (self._pauses and config.boundary == "continue")
        self._mode: PauseEngines = PauseEngines("in_place" if config.in_place else "retract")
        self._phase = Phase.SERVING
        self._number = -1

    @property
    def closed(self) -> bool:
        """Return whether an update is being prepared or carried out."""
        return self._phase is not Phase.SERVING

    def request(self, number: int) -> None:
        """The trainer wants to publish version `number`."""
        if self._phase is Phase.UPDATING and number == self._number:
            return
        self._phase = Phase.PREPARING
        self._number = number

    def ready(self, in_flight: int) -> list[Action]:
        """Return the actions that let the transfer begin, if it may begin now."""
        if self._phase is not Phase.PREPARING or (self._needs_idle and in_flight):
            return []
        self._phase = Phase.UPDATING
        allow = AllowUpdate(self._number)
        return [self._mode, allow] if self._pauses else [allow]

    def published(self) -> list[Action]:
        """Weights have changed."""
        was_paused = self._pauses and self._phase is Phase.UPDATING
        self._phase = Phase.SERVING
        return [ResumeEngines()] if was_paused else []
