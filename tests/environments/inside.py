"""A place whose objects live in the test's own process, and die when the test wants it."""

from __future__ import annotations

from typing import Any

from megatron_async.environments.agents import AgentProcess, AgentWorker
from megatron_async.environments.worker import EnvironmentProcess, EnvironmentWorker
from megatron_async.process_backends.backend import RemoteObjectLost, recorded


class InProcessObject:
    """An object that is made anew at some of its calls, before or after they had their effect.

    It dies at every call of which the number is a multiple of one in `before` or `after`.
    """

    def __init__(
        self, what: type, arguments: tuple[Any, ...], before: int = 0, after: int = 0
    ) -> None:
        self._what, self._arguments = what, arguments
        self._before, self._after = before, after
        self._object = what(*arguments)
        self.calls: list[str] = []

    def die(self) -> None:
        """What it held is gone."""
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
    """Implements what the product uses of `Place`."""

    address, one_machine = "inside:", True

    def __init__(self, before: int = 0, after: int = 0) -> None:
        self._dies = (before, after)
        self.started: list[InProcessObject] = []

    def start(self, what: type, *arguments: Any, **options: Any) -> InProcessObject:
        within = {EnvironmentProcess: EnvironmentWorker, AgentProcess: AgentWorker}
        what = within.get(what, what)  # the process is the test's
        self.started.append(InProcessObject(what, arguments, *self._dies))
        return self.started[-1]
