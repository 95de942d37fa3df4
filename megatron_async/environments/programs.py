"""Runs agents' programs: a user's function, or a command in a separate process.

A program gets the base URL of the chat API, an API key, and the task's row. Its result is its
reward: a number, a number with named numbers, or None. A command prints its result as JSON in the
last line of its output.

Invariants
- A program that is canceled makes no further call, since its key has been revoked. A command's
  process group is killed.
- An error of a program becomes an `EnvironmentFault` with a one-line message.
"""

import asyncio
import functools
import inspect
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, Final

from megatron_async.config.environment import AgentConfig
from megatron_async.environments.interface import EnvironmentFault
from megatron_async.environments.json_text import json_text
from megatron_async.errors import UserError, describe_exit, short_repr
from megatron_async.process_backends.child_process import after_fork, kill_group
from megatron_async.runtime.import_path import described, file_of, load_object
from megatron_async.runtime.outcome import outcome_of

Program = Callable[[str, str, Mapping[str, Any]], Awaitable[Any]]
"""Runs an agent's program with a base URL, an API key and a row; returns the program's result."""

_MAX_OUTPUT: Final = 1 << 20
_OUTPUT_SECONDS: Final = 2.0
_SHOWN_ERROR: Final = 300
_STACK_FRAME: Final = re.compile(r"\s+at |Node\.js v|\s*$")
_OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|\bOOM\b|cannot allocate memory|MemoryError|bad_alloc"
    r"|(reserve|reserving) .*memory",
    re.I,
)


def program_of(settings: AgentConfig, threads: Executor, memory_mib: int) -> Program:
    """Load the agent's function or command, and return an async function that runs it once.

    Args:
        settings: Settings of `agent`.
        threads: Runs a function that is not `async def`.
        memory_mib: Setting `episode.memory_mib`, which error messages about memory name.

    Raises:
        UserError: The function cannot be imported, or does not accept the arguments that it gets.
    """
    if settings.command:
        return _command(settings, memory_mib)
    function = load_object(settings.name, "agent.name")
    if not callable(function):
        raise UserError(f"{settings.display_name} is not a function")
    file = file_of(function)
    signature = inspect.signature(function)
    parameters = signature.parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in ("base_url", "api_key"):
        if name not in parameters and not every:
            raise UserError(
                f"{settings.display_name} does not accept the argument {name!r}. Add the argument."
            )
    for name in settings.arguments:
        if name not in parameters and not every:
            raise UserError(
                f"agent.arguments has {name!r}, which {settings.name!r} does not accept. Remove it."
            )

    async def run(url: str, key: str, row: Mapping[str, Any]) -> Any:
        """Call the agent's function once with the arguments that it names; return its result."""
        named = {**row, **settings.arguments, "base_url": url, "api_key": key}
        accepted = named if every else {n: value for n, value in named.items() if n in parameters}
        try:
            signature.bind(**accepted)
        except TypeError as error:
            raise EnvironmentFault(
                f"{settings.display_name} does not fit a row of {', '.join(sorted(row))}: {error}"
            ) from error
        try:
            if inspect.iscoroutinefunction(function):
                return await function(**accepted)
            loop = asyncio.get_running_loop()
            call = functools.partial(function, **accepted)
            returned, raised = await loop.run_in_executor(threads, outcome_of, call)
            if raised is not None:
                raise raised
            return await returned if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code raises anything
            raise EnvironmentFault(
                f"{settings.display_name} raised {described(error, file)}"
            ) from None

    return run


def is_blocking(settings: AgentConfig) -> bool:
    """Return whether the agent is a `def` function, which keeps a thread for a whole episode."""
    return not settings.command and not inspect.iscoroutinefunction(
        load_object(settings.name, "agent.name")
    )


def _command(settings: AgentConfig, memory_mib: int) -> Program:
    """Return an async function that runs the agent's command in a new process."""
    command, where = settings.command, f"agent.command {settings.command}"

    async def run(url: str, key: str, row: Mapping[str, Any]) -> Any:
        """Run the command to its end, and return the value in the last line of its output."""
        environment = {**os.environ, "OPENAI_BASE_URL": url, "OPENAI_API_KEY": key}
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                env=environment,
                stdin=pipe,
                stdout=pipe,
                stderr=pipe,
                start_new_session=True,
                preexec_fn=after_fork(signal.SIGKILL),
                limit=_MAX_OUTPUT,
            )
        except OSError as error:
            known = isinstance(error, FileNotFoundError | PermissionError)
            remedy = ". Name a program on PATH, or a file that can be executed (chmod +x)."
            raise EnvironmentFault(
                f"{where} cannot be started: {error}{remedy if known else ''}"
            ) from error
        try:
            outputs = await _communicate(process, json_text(dict(row)).encode(), where)
            output, errors = (text.replace(key.encode(), b"(key)") for text in outputs)
        finally:
            kill_group(process.pid)
            await process.wait()
        if process.returncode:
            text = errors.decode(errors="replace")
            ended = f"{where} {describe_exit(process.returncode)}: {_last_lines(text)}"
            if _OUT_OF_MEMORY.search(text):
                ended += (
                    f"; episode.memory_mib limits its address space to {memory_mib} MiB more than "
                    "its worker process used at start. Raise episode.memory_mib."
                )
            raise EnvironmentFault(ended)
        return _last_line(output, where)

    return run


async def _communicate(
    process: asyncio.subprocess.Process, row: bytes, where: str
) -> tuple[bytes, bytes]:
    """Send `row` to a command's standard input, wait for its end, and return its output.

    Returns:
        The newest `_MAX_OUTPUT` bytes of the command's standard output and of its standard error.
        Output that child processes of the command write more than `_OUTPUT_SECONDS` after the
        command's end is lost.
    """
    stdin, out, err = process.stdin, process.stdout, process.stderr
    assert stdin is not None and out is not None and err is not None
    output, errors = bytearray(), bytearray()

    async def write() -> None:
        with suppress(ConnectionError):  # The command may end without reading the row.
            # If the command has ended already, asyncio raises ConnectionError here but uvloop does
            # not, so check for it.
            if not stdin.is_closing():
                stdin.write(row + b"\n")
                await stdin.drain()
            stdin.close()

    async def read(stream: asyncio.StreamReader, newest: bytearray) -> None:
        while data := await stream.read(1 << 16):
            newest += data
            del newest[:-_MAX_OUTPUT]

    work = [asyncio.ensure_future(task) for task in (write(), read(out, output), read(err, errors))]
    try:
        while process.returncode is None and not all(task.done() for task in work):
            await asyncio.wait(work, timeout=_OUTPUT_SECONDS)
        await process.wait()
        # Processes that the command started may keep its outputs open. Those in its process group
        # are killed; others get `_OUTPUT_SECONDS` to close the outputs.
        kill_group(process.pid)
        await asyncio.wait(work, timeout=_OUTPUT_SECONDS)
    finally:
        for task in work:
            task.cancel()
    return bytes(output), bytes(errors)


def _last_lines(text: str) -> str:
    """Return the last lines of an error output, up to `_SHOWN_ERROR` characters but at least one.

    Node.js prints stack frames after its error message; they are left out.
    """
    lines = [line for line in text.splitlines() if not _STACK_FRAME.match(line)]
    last = lines.pop()[:_SHOWN_ERROR] if lines else "it printed no error"
    while lines and len(last) + len(lines[-1]) < _SHOWN_ERROR:
        last = f"{lines.pop()}\n{last}"
    return last


def _last_line(output: bytes, where: str) -> Any:
    """Parse the last non-empty line of a command's output as JSON, and return the value.

    A list becomes a tuple; no output gives None. `where` names the command in errors.

    Raises:
        EnvironmentFault: The line is not JSON.
    """
    lines = output.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "null")
    try:
        returned = json.loads(last)
    except ValueError as error:
        raise EnvironmentFault(
            f"{where} printed {short_repr(last)} as its last line; that line must be the reward: a "
            "number, [number, {name: number}] or null"
        ) from error
    return tuple(returned) if isinstance(returned, list) else returned
