"""The protocol of places: all that the product uses of the processes that its classes run in.

    place = place_at(address, logs)
    engine = place.start(EngineHost, "engine0", settings, name="engine0", gpus=1)
    url = await engine.call("start", limit=300)
    engine.end()

Invariants
- A call ends within its limit, which counts only time in which the caller could run, and its
  method goes on when the caller has died, was cancelled or has stopped waiting.
- Errors of this package reach the caller as they are. Any other is a defect of the method:
  `CallFailed`, with the traceback in the log of its process.
- An object is made anew, with the same arguments, when its process dies and it has restarts left.
  Calls under way are lost then; they are never repeated here.
- What is placed ends with the process that started it, however that ends.
"""

from collections.abc import Callable
from typing import Any, Final, Protocol

from megatron_async.errors import ComponentFailure, ProcessKilled

UNLIMITED: Final = 1_000_000_000
"""`restarts` without end."""


class PlacedLost(ProcessKilled):
    """The process of a placed object has died; it may be under way to be started again."""


class PlacedDead(PlacedLost):
    """A placed object has died for good."""


class CallLate(ComponentFailure):
    """A method has not returned within the limit of its call."""


class CallFailed(ComponentFailure):
    """A method has raised what is no error of this package: its type, first line and log."""


class Placed(Protocol):
    """An object in a process of its own. Calls raise what the method raises, and see above."""

    async def call(self, method: str, *arguments: Any, limit: float) -> Any:
        """Call it; asynchronous methods run at once, blocking ones one after another."""

    def ask(
        self,
        method: str,
        *arguments: Any,
        limit: float,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> Any:
        """Call it from code that blocks. What `while_waiting` raises, twice a second, ends it."""

    def end(self) -> None:
        """Kill it and all that it started. A second call does nothing."""


class Place(Protocol):
    """A cluster or a machine to place objects on; `one_machine`: only processes of this one.

    `address`: by which `place_at` finds it from another process.
    """

    address: str
    one_machine: bool

    def start(
        self,
        what: type,
        *arguments: Any,
        name: str,
        restarts: int = 0,
        gpus: int = 0,
        here: bool = False,
    ) -> Placed:
        """Make `what(*arguments)` in a new process; returns at once, and calls wait for it.

        `gpus`: of its own, as CUDA_VISIBLE_DEVICES there. `here`: on this machine, and to be
        found by its name. Raises ComponentFailure when so many GPUs are not there.
        """

    def find(self, name: str) -> Placed:
        """Return what was started `here` under this name, by any process."""

    def close(self) -> None:
        """Leave; the place itself ends with whoever opened it."""
