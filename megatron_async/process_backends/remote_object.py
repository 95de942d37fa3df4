"""An object in its process: made there, called there, and its replies packed for the caller.

Invariants
- A reply is one value of bytes, whatever it holds, and so is a request: no transport looks inside.
- An object that could not be made raises that at every call; its process stays.
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
    """Pack a call."""
    return pickle.dumps(call, pickle.HIGHEST_PROTOCOL)


class RemoteCalls(ABC, Generic[T]):
    """Calls of an object in another process, which `_called` makes (`Placed`)."""

    def __init__(self, name: str, log: str) -> None:
        """`log`: where the traceback of a defect is."""
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
        """Make a call, for `limit` seconds at most."""

    def _late(self, call: MethodCall, limit: float) -> CallTimeout:
        return CallTimeout(f"{self._name} did not answer {call.method} within {limit:g} s")

    def _result(self, reply: bytes, call: MethodCall) -> Any:
        """Return the value that a reply holds. Raises the error that it holds instead."""
        asked = f"{self._name} failed in {call.method}"
        try:
            content: Mapping[str, Any] = pickle.loads(reply)
        except Exception as error:  # it raises what it meets
            raise CallFailed(f"{asked}: its reply cannot be read: {one_line(error)}") from error
        if "defect" in content:
            raise CallFailed(f"{asked}: {content['defect']}; its traceback is in {self._log}")
        if "error" in content:
            raise content["error"]
        return content["value"]


class HostedObject:
    """`what(*arguments)`."""

    def __init__(self, what: Callable[..., Any], *arguments: Any) -> None:
        try:
            self._object = what(*arguments)
            self._failed: Exception | None = None
        except Exception as error:  # noqa: BLE001 - whoever calls gets it
            self._failed = error

    async def handle(self, request: bytes) -> bytes:
        """Make the call that `request` holds."""
        try:
            if self._failed is not None:
                raise self._failed
            call: MethodCall = pickle.loads(request)
            value = await call.on(self._object)  # bounded: by its caller
            return pickle.dumps({"value": value}, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - it is the caller's
            if _can_be_sent(error):
                return pickle.dumps({"error": error})
            traceback.print_exception(error)
            return pickle.dumps({"defect": one_line(error)})


def _can_be_sent(error: Exception) -> bool:
    """Return whether an error is one of ours, and the same when it has been pickled."""
    if type(error).__module__.partition(".")[0] != _OURS:
        return False
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:  # noqa: BLE001 - a class of several arguments is called with one
        return False
