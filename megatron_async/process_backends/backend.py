"""Defines the protocol by which the product starts objects in other processes and calls them.

    backend = connect_backend(address, logs)
    engine = backend.start(EngineHost, "engine0", settings, name="engine0", gpus=1)
    url = await engine.call(lambda host: host.start(), limit=300)
    engine.end()

Invariants
- `call` and `call_blocking` get a function that calls one asynchronous method once. In this
  process, the function gets a `CallRecorder`; the recorded call is made on the object in the
  object's process.
- A call ends within its limit, which counts only time in which the caller's process could run. The
  method continues if the caller dies, is canceled or stops waiting.
- Errors of this package's classes reach the caller unchanged. Any other error is a defect of the
  method: the caller gets `CallFailed`, and the log of the object's process has the traceback.
- If its process dies and restarts remain, an object is built again with the same arguments. Calls
  that were running are lost; a backend never repeats them.
- A remote object ends with the process that started it, in whatever way that process ends.

The remote objects of a run, and how they recover after a kill:

| object | restarts by the backend | called again by | continues from |
|---|---|---|---|
| `ManagerHost` | `engines.max_restarts` | `TrainLoop`, by `attach` | store, step of the trainer |
| `EngineHost` | none | `Fleet`, `engines.max_restarts` times | stored tokens, sent weights |
| `ScorerWorker` | unlimited | `scoring/pool.py` | nothing: jobs are sent again |
| `EnvironmentProcess`, `AgentProcess` | unlimited | `EpisodeSessions` | snapshot or responses |

- Manager: it must run again within `engines.start_timeout_seconds` and a minute. The trainer
  attaches on the same lineage (the number that grows by one at every resume), repeats the call that
  was lost, and publishes its weights to new engines.
- Engine: its trajectories continue on other engines. A new engine gets no requests before it has
  the current weights. The run ends when no engine remains and none may be restarted.
- Scorer: on one machine, a `ScorerWorker` is in the manager's process and restarts its scorer
  process. A score whose process dies is requested twice, an asynchronous one three times; then it
  counts as failed. On several machines, a call whose worker is lost is made up to five times.
- Environment or agent: a call whose worker dies is made three times at most, the last time with no
  other call of that worker. If this fails too, or the episode cannot be restored, the episode has
  failed (`episode.on_failure`).
- Trainer rank: backends do not start it. torchrun restarts all ranks, `trainer.max_restarts` times
  (0 by default); they restore the newest checkpoint on a new lineage and attach to the manager,
  which has continued generating (`train_loop/attempt.py`).

On one machine, `local.py` restarts processes; on several machines, Ray does.
"""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

from megatron_async.errors import ComponentFailure, ProcessKilled

UNLIMITED: Final = 1_000_000_000
"""Number of `restarts` that stands for no limit."""


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
R = TypeVar("R")


class RemoteObjectLost(ProcessKilled):
    """Error of a call whose remote object's process died; the process may be starting again."""


class RemoteObjectDead(RemoteObjectLost):
    """Error of a call whose remote object's process died and is not started again."""


class CallTimeout(ComponentFailure):
    """Error of a call whose method did not return within the call's time limit."""


class CallFailed(ComponentFailure):
    """Error of a call whose method raised an error of a class outside this package.

    The message has the type and first line of that error, and where the log has its traceback.
    """


@dataclass(frozen=True)
class MethodCall:
    """Name and arguments of a method call, as they are sent to the process of a remote object."""

    method: str
    arguments: tuple[Any, ...]

    def on(self, target: object) -> Any:
        """Call the method on `target`, and return its result (a coroutine for `async def`)."""
        return getattr(target, self.method)(*self.arguments)


class CallRecorder:
    """Placeholder for a remote object, whose every method returns its call as a `MethodCall`."""

    def __getattr__(self, method: str) -> Callable[..., MethodCall]:
        return lambda *arguments: MethodCall(method, arguments)


def recorded(what: Callable[[Any], Any]) -> MethodCall:
    """Return the method call that the function `what` makes on its argument, without running it."""
    return cast(MethodCall, what(CallRecorder()))


class RemoteObject(Protocol[T_co]):
    """An object in a separate process, whose asynchronous methods are called from this process."""

    def call(self, what: Callable[[T_co], Awaitable[R]], *, limit: float) -> Coroutine[Any, Any, R]:
        """Call a method of the remote object; the returned coroutine gives the method's result.

        Args:
            what: Function that calls one method on its argument, as in `lambda host: host.start()`.
                It is run immediately; the coroutine sends the recorded call.
            limit: Time limit in seconds.

        Raises:
            RemoteObjectLost: The object's process died.
            CallTimeout: The method did not return within `limit`.
            CallFailed: The method raised an error of a class outside this package. Errors of this
                package are raised as they are.
        """

    def call_blocking(
        self,
        what: Callable[[T_co], Awaitable[R]],
        *,
        limit: float,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> R:
        """Call a method of the remote object, block until it returns, and return its result.

        Parameters and errors are those of `call`. `while_waiting` is called twice a second; an
        error that it raises ends the wait.
        """

    def end(self) -> None:
        """Kill the process of the remote object and all processes that it started.

        A second call does nothing.
        """


class ProcessBackend(Protocol):
    """This machine, or a Ray cluster, on which objects can be started in separate processes.

    Attributes:
        address: Address by which `connect_backend` connects to the backend from another process.
        one_machine: Whether all processes are on this machine.
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
        """Start a process that builds the object `what(*arguments)`; return a handle to the object.

        The handle is returned at once; calls to the object wait until the object exists.

        Args:
            what: Class of the object, or a function that returns it.
            *arguments: Arguments of `what`; they must be picklable.
            name: Name of the object, also of its log.
            restarts: How often the process is started again after it died; `UNLIMITED` for always.
            gpus: Number of GPUs that the process has exclusively, set as its CUDA_VISIBLE_DEVICES.
            here: Whether the process must be on this machine, and can be found by its name.

        Raises:
            ComponentFailure: Fewer than `gpus` GPUs are free, or the process cannot be started.
        """

    def find(self, name: str, what: Callable[..., T]) -> RemoteObject[T]:
        """Return a handle to the object of class `what` that any process has started as `name` with
        `start(..., here=True)`.

        If no object has the name, calls through the handle raise RemoteObjectLost.
        """

    def close(self) -> None:
        """End this process's use of the backend, and the remote objects that it started.

        The backend itself ends with the process that opened it.
        """
