"""Provides a process backend whose objects are in the test's process and die on command."""

from __future__ import annotations

from typing import Any

from megatron_async.environments.agents import AgentProcess, AgentWorker
from megatron_async.environments.worker import EnvironmentProcess, EnvironmentWorker
from megatron_async.process_backends.backend import RemoteObjectLost, recorded


class InProcessObject:
    """An object that loses its state at some calls, as one whose process dies and is restarted.

    It dies before every call whose number is a multiple of `before`, and after every call whose
    number is a multiple of `after`; the reply of the latter is lost. 0 means never.
    """

    def __init__(
        self, what: type, arguments: tuple[Any, ...], before: int = 0, after: int = 0
    ) -> None:
        self._what, self._arguments = what, arguments
        self._before, self._after = before, after
        self._object = what(*arguments)
        self.calls: list[str] = []

    def die(self) -> None:
        """Replace the object by a new one, without the state of the old one."""
        self._object = self._what(*self._arguments)

    async def call(self, what: Any, *, limit: float) -> Any:
        call = recorded(what)
        self.calls.append(call.method)
        number = len(self.calls)
        if self._before and number % self._before == 0:
            self.die()
        dies = bool(self._after) and number % self._after == 0
        returned = await call.on(self._object)
        if dies:
            self.die()
            raise RemoteObjectLost("it died")
        return returned

    def end(self) -> None:
        pass


class InProcessBackend:
    """Backend with the methods of `ProcessBackend` that the product calls."""

    address, one_machine = "inside:", True

    def __init__(self, before: int = 0, after: int = 0) -> None:
        self._dies = (before, after)
        self.started: list[InProcessObject] = []

    def start(self, what: type, *arguments: Any, **options: Any) -> InProcessObject:
        within = {EnvironmentProcess: EnvironmentWorker, AgentProcess: AgentWorker}
        # The worker must not limit or end the process, because it is the test's.
        what = within.get(what, what)
        self.started.append(InProcessObject(what, arguments, *self._dies))
        return self.started[-1]
