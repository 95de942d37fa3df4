"""The protocol of places: all that the product uses of the processes that its classes run in.

    place = connect_backend(address, logs)
    engine = place.start(EngineHost, "engine0", settings, name="engine0", gpus=1)
    url = await engine.call(lambda host: host.start(), limit=300)
    engine.end()

Invariants
- `call` and `ask` get a function that makes one call of one asynchronous method. It gets a
  `CallRecorder` here; the call is made of the object in its process.
- A call ends within its limit, which counts only time in which the caller could run, and its
  method goes on when the caller has died, was canceled or has stopped waiting.
- Errors of this package reach the caller as they are. Any other is a defect of the method:
  `CallFailed`, with the traceback in the log of its process.
- An object is made anew, with the same arguments, when its process dies and it has restarts left.
  Calls under way are lost then; they are never repeated here.
- What is placed ends with the process that started it, however that ends.

What a run places, and how it comes back after a kill:

| object | restarts here | asked again by | continues from |
|---|---|---|---|
| `ManagerHost` | `engines.max_restarts` | `TrainLoop`, by `attach` | store, step of the trainer |
| `EngineHost` | none | `Fleet`, `engines.max_restarts` times | stored tokens, sent weights |
| `ScorerWorker` | unlimited | `scoring/pool.py` | nothing: jobs are sent again |
| `EnvironmentProcess`, `AgentProcess` | unlimited | `EpisodeSessions` | snapshot or answers |

- Manager: it must be back within `engines.start_timeout_seconds` and a minute. The trainer attaches
  on the same lineage, repeats the call that was lost and publishes its weights to new engines.
- Engine: its trajectories continue on other engines. A new engine serves nothing before it has the
  current weights. The run ends when no engine is left and none may be restarted.
- Scorer: on one machine, a `ScorerWorker` lives in the manager's process and restarts its scorer
  process. A score whose process dies is requested twice, an asynchronous one three times; then it
  counts as failed. On several machines, a call whose worker is lost is made up to five times.
- Environment or agent: a call whose worker dies is made three times at most, the last time with no
  other step on that worker. Then, or if it cannot be restored, its episode has failed
  (`episode.on_failure`).
- Trainer rank: it is not placed here. torchrun restarts all ranks, `trainer.max_restarts` times (0
  by default); they restore the newest checkpoint on a new lineage and attach to the manager, which
  has kept generating (`train_loop/attempt.py`).

On one machine, `local.py` restarts processes, on several machines Ray does.
"""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

from megatron_async.errors import ComponentFailure, ProcessKilled

UNLIMITED: Final = 1_000_000_000
"""`restarts` without end."""


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")


class RemoteObjectLost(ProcessKilled):
    """The process of a placed object has died; it may be under way to be started again."""


class RemoteObjectDead(RemoteObjectLost):
    """A placed object has died for good."""


class CallTimeout(ComponentFailure):
    """A method has not returned within the limit of its call."""


class CallFailed(ComponentFailure):
    """A method has raised what is no error of this package: its type, first line and log."""


@dataclass(frozen=True)
class MethodCall:
    """A call of a method by its name, as it travels to the process of the object."""

    method: str
    arguments: tuple[Any, ...]

    def on(self, target: object) -> Any:
        """Make the call."""
        return getattr(target, self.method)(*self.arguments)


class CallRecorder:
    """Stands for an object in another process: calling a method of it returns the `MethodCall`."""

    def __getattr__(self, method: str) -> Callable[..., MethodCall]:
        return lambda *arguments: MethodCall(method, arguments)


def recorded(what: Callable[[Any], Any]) -> MethodCall:
    """Return the method call that the function `what` makes, without making it."""
    return cast(MethodCall, what(CallRecorder()))


class RemoteObject(Protocol[T_co]):
    """An object in a process of its own. Calls raise what the method raises, and see above."""

    def call(self, what: Callable[[T_co], Awaitable[R]], *, limit: float) -> Coroutine[Any, Any, R]:
        """Make a call of the object. `what` runs at once, before the result is awaited."""

    def call_blocking(
        self,
        what: Callable[[T_co], Awaitable[R]],
        *,
        limit: float,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> R:
        """Make it from code that blocks. What `while_waiting` raises, twice a second, ends it."""

    def end(self) -> None:
        """Kill it and all that it started. A second call does nothing."""


class ProcessBackend(Protocol):
    """A cluster or a machine to place objects on; `one_machine`: only processes of this one.

    `address`: by which `connect_backend` finds it from another process.
    """

    address: str
    one_machine: bool

    def start(
        self,
        what: Callable[..., T],
        *arguments: Any,
        name: str,
        restarts: int = 0,
        gpus: int = 0,
        here: bool = False,
    ) -> RemoteObject[T]:
        """Make `what(*arguments)` in a new process; returns at once, and calls wait for it.

        `gpus`: of its own, as CUDA_VISIBLE_DEVICES there. `here`: on this machine, and to be
        found by its name. Raises ComponentFailure when so many GPUs are not there.
        """

    def find(self, name: str, what: Callable[..., T]) -> RemoteObject[T]:
        """Return the object of class `what` that any process started `here` under this name."""

    def close(self) -> None:
        """Leave; the place itself ends with whoever opened it."""
