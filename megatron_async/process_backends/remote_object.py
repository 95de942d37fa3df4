"""Packs calls to remote objects, and runs the objects in their processes.

Invariants
- A request is one bytes value, and so is a reply. The backends transfer them without looking
  inside.
- If an object could not be built, every call raises the error of building it, and its process
  continues to run.
"""

import pickle
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Generic

from megatron_async.errors import one_line
from megatron_async.process_backends.backend import (
    CallFailed,
    CallTimeout,
    MethodCall,
    R,
    T,
    recorded,
)
from megatron_async.runtime.blocking import blocking

_OURS = __name__.partition(".")[0]


def request_of(call: MethodCall) -> bytes:
    """Pickle a method call to the bytes of a request."""
    return pickle.dumps(call, pickle.HIGHEST_PROTOCOL)


class RemoteCalls(ABC, Generic[T]):
    """Base of handles to remote objects (implements `RemoteObject`).

    A subclass sends calls to the object's process, in `_called`.
    """

    def __init__(self, name: str, log: str) -> None:
        """Create a handle to the object `name`; error messages name `log` as its log."""
        self._name, self._log = name, log

    def call(self, what: Callable[[T], Awaitable[R]], *, limit: float) -> Coroutine[Any, Any, R]:
        return self._called(recorded(what), limit)

    def call_blocking(
        self,
        what: Callable[[T], Awaitable[R]],
        *,
        limit: float,
        while_waiting: Callable[[], None] = lambda: None,
    ) -> R:
        return blocking(self.call(what, limit=limit), while_waiting)

    @abstractmethod
    async def _called(self, call: MethodCall, limit: float) -> Any:
        """Send `call` to the object's process, wait up to `limit` seconds; return its result."""

    def _late(self, call: MethodCall, limit: float) -> CallTimeout:
        """Return the error for a call that exceeded its `limit` in seconds."""
        return CallTimeout(f"{self._name} did not reply to {call.method} within {limit:g} s")

    def _result(self, reply: bytes, call: MethodCall) -> Any:
        """Return the method's result from the bytes of a reply, or raise the error in the reply.

        Raises:
            CallFailed: The method raised an error of a class that is not from megatron_async, or
                the reply cannot be unpickled.
        """
        failed = f"{self._name} failed in {call.method}"
        try:
            content: Mapping[str, Any] = pickle.loads(reply)
        except Exception as error:  # Unpickling runs code of any class, which may raise anything.
            raise CallFailed(f"{failed}: its reply cannot be read: {one_line(error)}") from error
        if "defect" in content:
            raise CallFailed(f"{failed}: {content['defect']}; its traceback is in {self._log}")
        if "error" in content:
            raise content["error"]
        return content["value"]


class HostedObject:
    """Holds a remote object in the object's process; `handle` calls the object's methods."""

    def __init__(self, what: Callable[..., Any], *arguments: Any) -> None:
        """Build the object `what(*arguments)`. If that fails, every later call raises the error."""
        try:
            self._object = what(*arguments)
            self._failed: Exception | None = None
        except Exception as error:  # noqa: BLE001 - every call raises it
            self._failed = error

    async def handle(self, request: bytes) -> bytes:
        """Make the method call in `request`, and return the bytes of a reply: result or error."""
        try:
            if self._failed is not None:
                raise self._failed
            call: MethodCall = pickle.loads(request)
            # There is no time limit here, because the caller limits the time of its call.
            value = await call.on(self._object)
            return pickle.dumps({"value": value}, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - the caller gets it
            if _can_be_sent(error):
                return pickle.dumps({"error": error})
            traceback.print_exception(error)
            return pickle.dumps({"defect": one_line(error)})


def _can_be_sent(error: Exception) -> bool:
    """Return whether an error's class is from megatron_async and pickling keeps it unchanged."""
    if type(error).__module__.partition(".")[0] != _OURS:
        return False
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # noqa: BLE001 - unpickling may call a class with too few arguments
        return False
