"""Plays an environment object of the user's: every call of its methods goes through here.

Invariants
- Calls of one object never overlap. `async def` runs in the loop, `def` in a thread.
- Every call has a limit of time, which begins when it has its thread. What the user's code raises
  (SystemExit too), or does not end, is an `EnvironmentFault` in one sentence with file and line; an
  exception of a tool is its answer.
- An object is used for one episode and closed once, but for one in which a call hangs.
"""

import asyncio
import copy
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Final

from megatron_async.environments.interface import (
    LARGEST_OBSERVATION,
    LARGEST_STATE,
    Answer,
    EnvironmentFault,
    EnvironmentHung,
    Reply,
    ToolCall,
    messages_of,
    number_of,
    opening_of,
    reply_of,
)
from megatron_async.environments.tools import CallReader, bound, described, tool_message, tools_of
from megatron_async.errors import UserError, short_repr
from megatron_async.runtime.import_path import described as described_error
from megatron_async.runtime.import_path import load_object
from megatron_async.runtime.outcome import Outcome, outcome_of
from megatron_async.tasks.base import Message

_ENDING_SECONDS: Final = 1.0  # for what is canceled
Build = Callable[[], Any]


def environment_builder(name: str, arguments: Mapping[str, Any]) -> Build:
    """Return what builds one environment object; what cannot is a UserError."""
    found = load_object(name, "environment.name")
    if not callable(found):
        raise UserError(f"environment.name is {name!r}, which is no class or function")
    try:
        inspect.signature(found).bind(**arguments)
    except (TypeError, ValueError) as error:  # some classes in C have no signature
        raise UserError(f"environment.arguments do not fit {name!r}: {error}") from error
    return lambda: found(**copy.deepcopy(dict(arguments)))  # an object may change its own


class Threads:
    """Runs `def`, so many calls at once; all threads are there from the beginning.

    `hung`: calls that were given up and still have their thread.
    """

    def __init__(self, count: int) -> None:
        self.hung = 0
        self._pool = ThreadPoolExecutor(count, "environment")
        self._free = asyncio.Semaphore(count)
        together = threading.Barrier(count)
        for _ in range(count):
            self._pool.submit(together.wait)

    async def begin(self, action: Build) -> "asyncio.Future[Outcome]":
        """A call that runs, once there is a thread for it; canceled, it counts as hung."""
        loop = asyncio.get_running_loop()
        await self._free.acquire()
        call = self._pool.submit(outcome_of, action)
        waiting = asyncio.wrap_future(call)

        def ended() -> None:
            self._free.release()
            self.hung -= waiting.cancelled()

        def end(_: Any) -> None:
            with suppress(RuntimeError):  # the loop has ended before the call
                loop.call_soon_threadsafe(ended)

        call.add_done_callback(end)
        return waiting

    def close(self) -> None:
        """Wait for no call."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _task(work: Awaitable[Any]) -> "asyncio.Future[Outcome]":
    return asyncio.ensure_future(_outcome_of(work))


async def _outcome_of(work: Awaitable[Any]) -> Outcome:
    try:
        return await work, None
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
        return None, error


def built(build: Build, name: str) -> Any:
    """An object of the user's. Raises UserError where its class raises, or has half a snapshot."""
    try:
        made = build()
    except Exception as error:  # the user's code may raise anything
        raise UserError(
            f"environment.name is {name!r}, and building it raised {described_error(error)}"
        ) from error
    has = [
        way for way in ("state", "restore") if inspect.isfunction(getattr(type(made), way, None))
    ]
    if len(has) == 1:
        raise UserError(
            f"environment.name is {name!r}, which has `{has[0]}` alone of `state` and `restore`; "
            "an episode goes on from a snapshot with both: add the other, or take it away"
        )
    return made


class EnvironmentRunner:
    """Plays one environment object. `seconds`: limit of a call; `threads`: where `def` runs."""

    def __init__(self, build: Build, name: str, threads: Threads, seconds: float) -> None:
        self._name = name
        self._threads = threads
        self._seconds = seconds
        self._build = build
        self._object: Any = None
        self._parts: dict[str, float] = {}

    async def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> tuple[Message, ...]:
        """Build the object and begin. Raises EnvironmentFault."""
        self._object = await self._run("__init__", self._build)
        opening = await self._call("reset", **self._fitting("reset", row))
        if isinstance(opening, str) and prompt and self.tools:
            # As TRL has it: the opening of a class of tools follows the row's prompt.
            *before, last = prompt
            whole = {**last, "content": last["content"] + opening}
            return (*before, *messages_of([whole], self._where("reset")))
        return opening_of(opening, prompt, self._where("reset"))

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """The object's tools; none where it has `step`."""
        return tools_of(self._object, self._name)

    def schemas(self) -> list[dict[str, Any]]:
        """The tools as chat templates take them. Raises UserError."""
        return described(self.tools, self._name)

    async def step(self, answer: Answer, reader: CallReader | None = None) -> Reply:
        """Give the answer to the environment, or its calls to the tools. Raises EnvironmentFault.

        `reader` finds calls in the answer's text.
        """
        complaint = ""
        if reader is not None:
            text, calls, complaint = reader.read(answer.text)
            answer = Answer(text, calls, answer.truncated, answer.turn)
        if hasattr(self._object, "step"):
            return reply_of(await self._call("step", answer), self._where("step"))
        end = time.monotonic() + self._seconds  # of all calls of the answer
        # The policy chooses what it asks for: a long result is no fault of the environment.
        most = LARGEST_OBSERVATION // 2 // max(1, len(answer.tool_calls))
        replies = []
        for call in answer.tool_calls:
            reply = await self._tool(call, end - time.monotonic())
            if (length := len(reply["content"])) > most:
                what = f"Error: the result has {length:,} characters; at most {most:,} are shown"
                reply = tool_message(call.name, what)
            replies.append(reply)
        replies += [tool_message("error", complaint)] if complaint else []
        messages = messages_of(replies, self._name) if replies else ()
        return Reply(messages, 0.0, not replies, {})

    async def _tool(self, call: ToolCall, seconds: float) -> Message:
        """Return the reply to a call. Raises EnvironmentFault."""
        try:
            action = bound(self.tools, call)
            if isinstance(action, str):
                return tool_message(call.name, action)
            returned, error = await self._tried(call.name, action, seconds)
            if error is None:
                return tool_message(call.name, returned)
            raise error if isinstance(error, Exception) else self._raised(call.name, error)
        except EnvironmentFault:
            raise
        except Exception as raised:  # noqa: BLE001 - the policy reads what its call has raised
            return tool_message(call.name, f"Error: {type(raised).__name__}: {raised}")

    async def final_reward(self) -> tuple[float, Mapping[str, float]]:
        """`get_reward()`, or a number `reward` of a class of tools (as TRL's have); else 0.

        Raises EnvironmentFault.
        """
        if hasattr(self._object, "get_reward"):
            return number_of(await self._call("get_reward"), self._where("get_reward"))
        if not hasattr(self._object, "step") and self.rewards:
            return number_of(self._object.reward, self._where("reward"))
        return 0.0, {}

    @property
    def rewards(self) -> bool:
        """Return whether the object has a method or a number that gives rewards."""
        kept = getattr(self._object, "reward", None)
        methods = any(hasattr(self._object, name) for name in ("get_reward", "step"))
        return methods or hasattr(kept, "__float__")

    async def state(self) -> bytes | None:
        """A snapshot; None where the class makes none, or a larger one than is kept."""
        if not (hasattr(self._object, "state") and hasattr(self._object, "restore")):
            return None
        snapshot = await self._call("state")
        if not isinstance(snapshot, bytes):
            raise EnvironmentFault(
                f"{self._where('state')} returned {short_repr(snapshot)}; it must be bytes"
            )
        return bytes(snapshot) if len(snapshot) <= LARGEST_STATE else None

    async def restore(self, snapshot: bytes, row: Mapping[str, Any]) -> None:
        """Build an object that goes on from a snapshot. Raises EnvironmentFault."""
        self._object = await self._run("__init__", self._build)
        await self._call("restore", snapshot, **self._fitting("restore", row, snapshot))

    async def close(self) -> None:
        """End the object. Raises EnvironmentFault."""
        ending, self._object = self._object, None
        if hasattr(ending, "close"):
            await self._run("close", ending.close)

    def _fitting(self, method: str, row: Mapping[str, Any], *first: Any) -> dict[str, Any]:
        """The columns of the row that a method takes: all where it has `**row`.

        But for those that have the names of its first arguments, which are `first`. Raises
        EnvironmentFault where it takes one that the row has not.
        """
        found = getattr(self._object, method, None)
        if not callable(found):
            return {}
        signature = inspect.signature(found)
        known = signature.parameters
        every = any(p.kind is p.VAR_KEYWORD for p in known.values())
        taken = list(known)[: len(first)]
        given = {n: v for n, v in row.items() if n not in taken and (every or n in known)}
        try:
            signature.bind(*first, **given)
        except TypeError as error:
            raise EnvironmentFault(
                f"{self._where(method)} does not fit a row of {', '.join(sorted(row))}: {error}"
            ) from error
        return given

    async def _call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        found = getattr(self._object, method, None)
        if found is None:
            raise EnvironmentFault(f"the class has no method {method!r}")
        return await self._run(method, lambda: found(*arguments, **named))

    async def read(self, action: Build) -> Any:
        """Run `action` on what the object returned, whose size is the user's choice.

        Raises EnvironmentFault.
        """
        return await self._run("observation", action)

    async def _run(self, method: str, action: Build) -> Any:
        """Return what `action` returns. Raises EnvironmentFault."""
        returned, error = await self._tried(method, action, self._seconds)
        if error is not None:
            raise self._raised(method, error)
        return returned

    async def _tried(self, method: str, action: Build, seconds: float) -> Outcome:
        """Run `action` and return what it returned or raised.

        An exception is returned, since a coroutine cannot raise a StopIteration. Raises
        EnvironmentFault after `seconds`.
        """
        if self._is_async(method):
            return await self._within(_task(action()), method, seconds)
        returned, error = await self._within(await self._threads.begin(action), method, seconds)
        if error is None and inspect.isawaitable(returned):
            return await self._within(_task(returned), method, seconds)
        return returned, error

    def _raised(self, method: str, error: BaseException) -> EnvironmentFault:
        """Return the fault that names a method and what it raised."""
        fault = EnvironmentFault(f"{self._where(method)} raised {described_error(error)}")
        fault.__cause__ = error
        return fault

    async def _within(
        self, call: "asyncio.Future[Outcome]", method: str, seconds: float
    ) -> Outcome:
        """The outcome of a call that is under way. Raises EnvironmentFault after `seconds`."""
        await asyncio.wait([call], timeout=max(0.0, seconds))
        if call.done():
            return call.result()
        late = f"{self._where(method)} took longer than {self._seconds:g} s"
        call.cancel()
        await asyncio.wait([call], timeout=_ENDING_SECONDS)
        if isinstance(call, asyncio.Task) and call.done():
            raise EnvironmentFault(f"{late} (episode.step_seconds)")
        self._object = None  # it is in use, for ever perhaps
        self._threads.hung += 1
        raise EnvironmentHung(f"{late} (episode.step_seconds) and goes on")

    def _is_async(self, method: str) -> bool:
        return inspect.iscoroutinefunction(getattr(self._object, method, None))

    def _where(self, method: str) -> str:
        return f"{self._name.rpartition(':')[2]}.{method}"
