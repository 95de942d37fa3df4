"""Calls the methods of users' environment objects, with a time limit for each call.

Invariants
- Calls to one object never overlap. `async def` methods run on the event loop, `def` methods in a
  thread.
- The time limit of a call starts once the call has its thread. An exception of the user's code
  (also SystemExit) becomes an `EnvironmentFault`, whose one-line message has the file and the line;
  so does a call that exceeds its limit. An exception that a tool raises is instead sent to the
  policy as the tool's result.
- An object is used for one episode and closed once. An object in which a call hangs is not closed.
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
    MAX_OBSERVATION,
    MAX_STATE,
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

_CANCEL_SECONDS: Final = 1.0  # Time in seconds in which a canceled call must end.
Build = Callable[[], Any]


def environment_builder(name: str, arguments: Mapping[str, Any]) -> Build:
    """Import the class or function `name`; return a function that builds an environment with it.

    Args:
        name: Import path of the class or function (setting `environment.name`).
        arguments: Keyword arguments that each environment is built with.

    Raises:
        UserError: `name` cannot be imported or called, or `arguments` do not fit.
    """
    found = load_object(name, "environment.name")
    if not callable(found):
        raise UserError(f"environment.name is {name!r}, which is neither a class nor a function")
    try:
        inspect.signature(found).bind(**arguments)
    except (TypeError, ValueError) as error:
        # The arguments do not fit (TypeError), or a class in C has no signature (ValueError).
        raise UserError(f"environment.arguments do not fit {name!r}: {error}") from error
    # Each object gets a copy of the arguments, because it may change them.
    return lambda: found(**copy.deepcopy(dict(arguments)))


class Threads:
    """Thread pool of a worker, which runs the `def` methods of its environments.

    All threads are started at once when the pool is created, before the worker limits its memory.

    Attributes:
        hung: Number of abandoned calls that still occupy their thread. An `async def` call that
            ignores its cancellation is counted too, and is never subtracted.
    """

    def __init__(self, count: int) -> None:
        """Start `count` threads."""
        self.hung = 0
        self._pool = ThreadPoolExecutor(count, "environment")
        self._free = asyncio.Semaphore(count)
        # Make the pool start all its threads now. It starts a thread only for a call that finds no
        # idle one, so each call blocks its thread until all `count` calls have reached the barrier.
        together = threading.Barrier(count)
        for _ in range(count):
            self._pool.submit(together.wait)

    async def begin(self, action: Build) -> "asyncio.Future[Outcome]":
        """Wait for a free thread, start `action` in it, and return a future of its result or error.

        The thread stays occupied until `action` returns, even if the future is canceled. A caller
        that cancels the future adds the call to `hung`; the count falls when `action` returns.
        """
        loop = asyncio.get_running_loop()
        await self._free.acquire()
        call = self._pool.submit(outcome_of, action)
        waiting = asyncio.wrap_future(call)

        def ended() -> None:
            self._free.release()
            self.hung -= int(waiting.cancelled())

        def end(_: Any) -> None:
            with suppress(RuntimeError):  # The loop may be closed before the call ends.
                loop.call_soon_threadsafe(ended)

        call.add_done_callback(end)
        return waiting

    def close(self) -> None:
        """Shut the thread pool down without waiting for running calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _task(work: Awaitable[Any]) -> "asyncio.Future[Outcome]":
    """Start `work` as a task on the event loop; return the task, which never raises."""
    return asyncio.ensure_future(_outcome_of(work))


async def _outcome_of(work: Awaitable[Any]) -> Outcome:
    """Await `work` and return its result and None, or None and the exception that it raised."""
    try:
        return await work, None
    except BaseException as error:  # noqa: BLE001 - a user's code may raise anything
        return None, error


def built(build: Build, name: str) -> Any:
    """Build an environment object with `build`, check its snapshot methods, and return it.

    `name` is the setting `environment.name`, for error messages.

    Raises:
        UserError: Building the object raised, or its class has only one of `state` and `restore`.
    """
    try:
        made = build()
    except Exception as error:  # User code may raise anything.
        raise UserError(
            f"environment.name is {name!r}, and building it raised {described_error(error)}"
        ) from error
    has = [
        method
        for method in ("state", "restore")
        if inspect.isfunction(getattr(type(made), method, None))
    ]
    if len(has) == 1:
        raise UserError(
            f"environment.name is {name!r}, which has only `{has[0]}` of `state` and `restore`; an "
            "episode can be restored from a snapshot only with both. Add the other, or remove it."
        )
    return made


class EnvironmentRunner:
    """Calls the methods of one environment object during one episode, each with a time limit."""

    def __init__(self, build: Build, name: str, threads: Threads, seconds: float) -> None:
        """Prepare a runner without an object; `reset` or `restore` builds the object.

        Args:
            build: Builds the environment object.
            name: Setting `environment.name`, for error messages.
            threads: Runs the `def` methods of the object.
            seconds: Time limit of one call.
        """
        self._name = name
        self._threads = threads
        self._seconds = seconds
        self._build = build
        self._object: Any = None
        self._parts: dict[str, float] = {}

    async def reset(self, row: Mapping[str, Any], prompt: Sequence[Message]) -> tuple[Message, ...]:
        """Build the environment object, call its `reset`, and return the episode's first messages.

        Args:
            row: Columns of the task's row; `reset` gets those that it names.
            prompt: The row's prompt as messages; empty if the row has no prompt.

        Raises:
            EnvironmentFault: A method raised, timed out or returned an invalid opening.
        """
        self._object = await self._run("__init__", self._build)
        opening = await self._call("reset", **self._matching_columns("reset", row))
        if isinstance(opening, str) and prompt and self.tools:
            # As in TRL, the text that `reset` of a class of tools returns is appended to the last
            # message of the row's prompt.
            *before, last = prompt
            whole = {**last, "content": last["content"] + opening}
            return (*before, *messages_of([whole], self._where("reset")))
        return opening_of(opening, prompt, self._where("reset"))

    @property
    def tools(self) -> dict[str, Callable[..., Any]]:
        """The object's public methods that the policy may call; empty if the class has `step`."""
        return tools_of(self._object, self._name)

    def schemas(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the object's tools, in the form that chat templates expect.

        Raises:
            UserError: A tool cannot be described.
        """
        return described(self.tools, self._name)

    async def step(self, answer: Answer, reader: CallReader | None = None) -> Reply:
        """Send a response of the policy to the environment, and return the environment's reply.

        An object with `step` gets the response. For a class of tools, the tool calls in the
        response are made, and the reply has their results; a response without a tool call ends the
        episode.

        Args:
            answer: The response, as text.
            reader: Parses the tool calls in the response's text; None for no tool calls.

        Raises:
            EnvironmentFault: A method raised, timed out or returned an invalid value.
        """
        complaint = ""
        if reader is not None:
            text, calls, complaint = reader.read(answer.text)
            answer = Answer(text, calls, answer.truncated, answer.turn)
        if hasattr(self._object, "step"):
            return reply_of(await self._call("step", answer), self._where("step"))
        end = time.monotonic() + self._seconds  # All tool calls of the response share one limit.
        # All results together must not exceed MAX_OBSERVATION, which would be a fault of the
        # environment. So each result gets a share of half of that. A longer result is replaced by
        # an error for the policy, because the policy chose the call.
        most = MAX_OBSERVATION // 2 // max(1, len(answer.tool_calls))
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
        """Make one tool call; return the message with its result, or with its error.

        Args:
            call: The tool call that the policy wrote.
            seconds: Time limit of the call.

        Raises:
            EnvironmentFault: The call timed out, or raised something other than an Exception.
        """
        try:
            action = bound(self.tools, call)
            if isinstance(action, str):
                return tool_message(call.name, action)
            returned, error = await self._outcome(call.name, action, seconds)
            if error is None:
                return tool_message(call.name, returned)
            raise error if isinstance(error, Exception) else self._raised(call.name, error)
        except EnvironmentFault:
            raise
        except Exception as raised:  # noqa: BLE001 - the policy reads what its call raised
            return tool_message(call.name, f"Error: {type(raised).__name__}: {raised}")

    async def final_reward(self) -> tuple[float, Mapping[str, float]]:
        """Return the reward that is added at the end of the episode, and named numbers for metrics.

        This is the result of `get_reward()`, or else the attribute `reward` of a class of tools (as
        in TRL), or else 0.

        Raises:
            EnvironmentFault: `get_reward` raised or timed out, or the reward is not valid.
        """
        if hasattr(self._object, "get_reward"):
            return number_of(await self._call("get_reward"), self._where("get_reward"))
        if not hasattr(self._object, "step") and self.rewards:
            return number_of(self._object.reward, self._where("reward"))
        return 0.0, {}

    @property
    def rewards(self) -> bool:
        """Whether the object can give rewards: by `get_reward`, `step` or a number `reward`."""
        attribute = getattr(self._object, "reward", None)
        methods = any(hasattr(self._object, name) for name in ("get_reward", "step"))
        return methods or hasattr(attribute, "__float__")

    async def state(self) -> bytes | None:
        """Return a snapshot of the object, from which `restore` can build it again.

        The result is None if the class does not have both `state` and `restore`, or if the snapshot
        is larger than `MAX_STATE`.

        Raises:
            EnvironmentFault: `state` raised, timed out or did not return bytes.
        """
        if not (hasattr(self._object, "state") and hasattr(self._object, "restore")):
            return None
        snapshot = await self._call("state")
        if not isinstance(snapshot, bytes):
            raise EnvironmentFault(
                f"{self._where('state')} returned {short_repr(snapshot)}; it must be bytes"
            )
        return bytes(snapshot) if len(snapshot) <= MAX_STATE else None

    async def restore(self, snapshot: bytes, row: Mapping[str, Any]) -> None:
        """Build a new environment object, and call its `restore` with `snapshot` and the row.

        Raises:
            EnvironmentFault: A method raised or timed out.
        """
        self._object = await self._run("__init__", self._build)
        await self._call("restore", snapshot, **self._matching_columns("restore", row, snapshot))

    async def close(self) -> None:
        """Call the object's `close` if it has one, and drop the object.

        Raises:
            EnvironmentFault: `close` raised or timed out.
        """
        ending, self._object = self._object, None
        if hasattr(ending, "close"):
            await self._run("close", ending.close)

    def _matching_columns(self, method: str, row: Mapping[str, Any], *first: Any) -> dict[str, Any]:
        """Return the columns of the row that the object's `method` accepts as keyword arguments.

        A method with `**row` accepts all columns.

        Args:
            method: Name of the method.
            row: Columns of the task's row.
            *first: Positional arguments of the call; columns with their names are left out.

        Raises:
            EnvironmentFault: The method requires an argument that is not a column of the row.
        """
        found = getattr(self._object, method, None)
        if not callable(found):
            return {}
        signature = inspect.signature(found)
        names = signature.parameters
        every = any(p.kind is p.VAR_KEYWORD for p in names.values())
        bound_names = list(names)[: len(first)]
        columns = {n: v for n, v in row.items() if n not in bound_names and (every or n in names)}
        try:
            signature.bind(*first, **columns)
        except TypeError as error:
            raise EnvironmentFault(
                f"{self._where(method)} does not fit a row of {', '.join(sorted(row))}: {error}"
            ) from error
        return columns

    async def _call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        """Call `method` of the object within the time limit, and return its result.

        Raises:
            EnvironmentFault: The object does not have the method, or the method raised or timed
                out.
        """
        found = getattr(self._object, method, None)
        if found is None:
            raise EnvironmentFault(f"the class has no method {method!r}")
        return await self._run(method, lambda: found(*arguments, **named))

    async def read(self, action: Build) -> Any:
        """Run `action`, which processes the object's messages, in a thread; return its result.

        The time limit of a call applies, because the user's code determines how large the messages
        are.

        Raises:
            EnvironmentFault: `action` raised or timed out.
        """
        return await self._run("observation", action)

    async def _run(self, method: str, action: Build) -> Any:
        """Run `action`, which calls `method`, within the time limit of a call; return its result.

        Raises:
            EnvironmentFault: `action` raised or timed out.
        """
        returned, error = await self._outcome(method, action, self._seconds)
        if error is not None:
            raise self._raised(method, error)
        return returned

    async def _outcome(self, method: str, action: Build, seconds: float) -> Outcome:
        """Run `action`, which calls `method`; return its result or the exception that it raised.

        An `async def` method runs on the event loop, any other in a thread. The exception is
        returned because a coroutine cannot raise a StopIteration.

        Raises:
            EnvironmentFault: `action` did not end within `seconds`.
        """
        if self._is_async(method):
            return await self._within(_task(action()), method, seconds)
        returned, error = await self._within(await self._threads.begin(action), method, seconds)
        if error is None and inspect.isawaitable(returned):
            return await self._within(_task(returned), method, seconds)
        return returned, error

    def _raised(self, method: str, error: BaseException) -> EnvironmentFault:
        """Return an EnvironmentFault whose message names `method` and what it raised."""
        fault = EnvironmentFault(f"{self._where(method)} raised {described_error(error)}")
        fault.__cause__ = error
        return fault

    async def _within(
        self, call: "asyncio.Future[Outcome]", method: str, seconds: float
    ) -> Outcome:
        """Wait for a running `call` of `method` and return its outcome; cancel it after `seconds`.

        Raises:
            EnvironmentFault: The call did not end within `seconds` and was canceled.
            EnvironmentHung: The call did not end within `seconds` and could not be canceled.
        """
        await asyncio.wait([call], timeout=max(0.0, seconds))
        if call.done():
            return call.result()
        late = f"{self._where(method)} took longer than {self._seconds:g} s"
        call.cancel()
        await asyncio.wait([call], timeout=_CANCEL_SECONDS)
        if isinstance(call, asyncio.Task) and call.done():
            raise EnvironmentFault(f"{late} (episode.step_seconds)")
        # Drop the object without closing it, because the hanging call still uses it.
        self._object = None
        self._threads.hung += 1
        raise EnvironmentHung(f"{late} (episode.step_seconds) and is still running")

    def _is_async(self, method: str) -> bool:
        return inspect.iscoroutinefunction(getattr(self._object, method, None))

    def _where(self, method: str) -> str:
        """Return `Class.method` for error messages."""
        return f"{self._name.rpartition(':')[2]}.{method}"
