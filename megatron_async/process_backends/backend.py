"""Defines the protocol by which the product starts objects in other processes and calls them.

    backend = connect_backend(address, logs)
    engine = backend.start(EngineHost, "engine0", settings, name="engine0", gpus=1)
    url = await engine.call(lambda host: host.start(), limit=300)
    engine.end()

Invariants
- `call` and `call_blocking` get a function that calls one asynchronous method once. They run this
  function on a `CallRecorder`, which records the name and arguments of the call. The recorded call
  is then made on the object, in the object's process.
- A call ends within its time limit. The limit counts only time in which the caller's process could
  run, so that a process that was stopped for a while does not find all its limits exceeded. If the
  caller dies, is canceled or stops waiting, the method continues.
- An error whose class is defined in megatron_async reaches the caller unchanged. Any other error is
  a defect of the method: the caller gets `CallFailed`, and the log of the object's process has the
  traceback.
- If the process of an object dies and restarts remain, the object is built again in a new process
  with the same arguments. Calls that were running are lost; a backend never repeats them.
- A remote object ends when the process that started it ends, even if that process is killed.

The remote objects of a run, and how they recover after a kill:

| object | restarts by the backend | called again by | continues from |
|---|---|---|---|
| `ManagerHost` | `engines.max_restarts` | `TrainLoop`, by `attach` | store, step of the trainer |
| `EngineHost` | none | `Fleet`, `engines.max_restarts` times | stored tokens, sent weights |
| `ScorerWorker` | unlimited | `scoring/pool.py` | nothing: jobs are sent again |
| `EnvironmentProcess`, `AgentProcess` | unlimited | `EpisodeSessions` | snapshot or responses |

- Manager: it must run again within `engines.start_timeout_seconds` plus one minute. The trainer
  calls its `attach`, which opens the store again on the same lineage (the number that grows by one
  at every resume). The trainer then repeats the call that was lost, and publishes its weights to
  the new engines.
- Engine: its trajectories continue on other engines. A new engine gets no requests before it has
  the current weights. The run ends when no engine remains and none may be restarted.
- Scorer: on one machine, a `ScorerWorker` is in the manager's process and restarts its scorer
  process. A score during which the process dies is tried up to two times, or three times if its
  reward is asynchronous; then it counts as failed. On several machines, a call whose worker is lost
  is made up to five times.
- Environment or agent: a call whose worker dies is made up to three times. During the last attempt,
  no other episode begins or steps in the worker. If this attempt fails too, or the episode cannot
  be restored, the episode has failed, and the setting `episode.on_failure` decides what follows.
- Trainer rank: backends do not start it. torchrun restarts all ranks, `trainer.max_restarts` times
  (0 by default). The ranks then restore the newest checkpoint on a new lineage and attach to the
  manager, which has continued generating. `train_loop/attempt.py` describes this.

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
    """Error of a call to a remote object whose process died, or was not found by its name.

    The process may be starting again.
    """


class RemoteObjectDead(RemoteObjectLost):
    """Error of a call to a remote object whose process died and will not be started again."""


class CallTimeout(ComponentFailure):
    """Error of a call whose method did not return within the call's time limit."""


class CallFailed(ComponentFailure):
    """Error of a call whose method raised an error of a class that is not from megatron_async.

    The message has the type and first line of that error, and names the log with its traceback.
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
            CallFailed: The method raised an error of a class that is not from megatron_async.
                Errors of classes from megatron_async are raised as they are.
        """

    def call_blocking(
        self,
        what: Callable[[T_co], Awaitable[R]],
        *,
        limit: float,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> R:
        """Call a method of the remote object, block until it returns, and return its result.

        The other parameters and the errors are the same as for `call`. `while_waiting` is called
        twice a second during the wait. If it raises an error, the wait ends with that error.
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
            name: Name of the object, from which the name of its log is made.
            restarts: How often the process is started again after it died; `UNLIMITED` for always.
            gpus: Number of GPUs that the process has exclusively, set as its CUDA_VISIBLE_DEVICES.
            here: Whether the process must be on this machine, and can be found by its name.

        Raises:
            ComponentFailure: Fewer than `gpus` GPUs are free, or the process cannot be started.
        """

    def find(self, name: str, what: Callable[..., T]) -> RemoteObject[T]:
        """Return a handle to the object `name` of class `what`, which any process may have started.

        It must have been started with `here=True`. If no object has the name, calls through the
        handle raise RemoteObjectLost.
        """

    def close(self) -> None:
        """Stop using the backend in this process, and end the remote objects that it started.

        For other processes, the backend ends when the process that opened it ends.
        """
