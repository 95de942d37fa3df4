"""Programs that are agents: a function, or a command in a process of its own.

A program gets the base URL, a key and the row. It returns a number, a number with named parts, or
None; of a command that is the last line of its output, as JSON.

Invariants
- A program that is canceled makes no further call, since its key has ended; a command's process
  group is killed.
- What it raises is an `EnvironmentFault` in one sentence.
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
"""From a base URL, a key and a row to what it returns."""

_LARGEST_OUTPUT: Final = 1 << 20
_OUTPUT_SECONDS: Final = 2.0
_SHOWN_ERROR: Final = 300
_STACK_FRAME: Final = re.compile(r"\s+at |Node\.js v|\s*$")
_OUT_OF_MEMORY: Final = re.compile(
    r"out of memory|\bOOM\b|cannot allocate memory|MemoryError|bad_alloc"
    r"|(reserve|reserving) .*memory",
    re.I,
)


def program_of(settings: AgentConfig, threads: Executor, memory_mib: int) -> Program:
    """The program that the settings name; `threads` run a function that is not `async def`.

    `memory_mib` is the limit of a command's memory, which its errors name.

    Raises UserError.
    """
    if settings.command:
        return _command(settings, memory_mib)
    function = load_object(settings.name, "agent.name")
    if not callable(function):
        raise UserError(f"{settings.display_name} is no function")
    file = file_of(function)
    signature = inspect.signature(function)
    parameters = signature.parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in ("base_url", "api_key"):
        if name not in parameters and not every:
            raise UserError(f"{settings.display_name} takes no argument {name!r}; it needs one")
    for name in settings.arguments:
        if name not in parameters and not every:
            raise UserError(f"agent.arguments has {name!r}, which {settings.name!r} does not take")

    async def run(url: str, key: str, row: Mapping[str, Any]) -> Any:
        given = {**row, **settings.arguments, "base_url": url, "api_key": key}
        fitting = given if every else {n: value for n, value in given.items() if n in parameters}
        try:
            signature.bind(**fitting)
        except TypeError as error:
            raise EnvironmentFault(
                f"{settings.display_name} does not fit a row of {', '.join(sorted(row))}: {error}"
            ) from error
        try:
            if inspect.iscoroutinefunction(function):
                return await function(**fitting)
            loop = asyncio.get_running_loop()
            whole = functools.partial(function, **fitting)
            returned, raised = await loop.run_in_executor(threads, outcome_of, whole)
            if raised is not None:
                raise raised
            return await returned if inspect.isawaitable(returned) else returned
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code raises anything
            raise EnvironmentFault(
                f"{settings.display_name} raised {described(error, file)}"
            ) from None

    return run


def is_blocking(settings: AgentConfig) -> bool:
    """Return whether each episode keeps a thread."""
    return not settings.command and not inspect.iscoroutinefunction(
        load_object(settings.name, "agent.name")
    )


def _command(settings: AgentConfig, memory_mib: int) -> Program:
    command, where = settings.command, f"agent.command {settings.command}"

    async def run(url: str, key: str, row: Mapping[str, Any]) -> Any:
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
                limit=_LARGEST_OUTPUT,
            )
        except OSError as error:
            remedy = "; name a program on PATH, or a file that may be executed (chmod +x)"
            known = isinstance(error, FileNotFoundError | PermissionError)
            raise EnvironmentFault(f"{where} cannot be started: {error}{remedy * known}") from error
        try:
            found = await _run_to_its_end(process, json_text(dict(row)).encode(), where)
            output, errors = (text.replace(key.encode(), b"(key)") for text in found)
        finally:
            kill_group(process.pid)
            await process.wait()
        if process.returncode:
            text = errors.decode(errors="replace")
            ended = f"{where} {describe_exit(process.returncode)}: {_last_lines(text)}"
            if _OUT_OF_MEMORY.search(text):
                ended += (
                    f"; episode.memory_mib limits its address space to {memory_mib} MiB more than "
                    "its start takes: raise it"
                )
            raise EnvironmentFault(ended)
        return _last_line(output, where)

    return run


async def _run_to_its_end(
    process: asyncio.subprocess.Process, row: bytes, where: str
) -> tuple[bytes, bytes]:
    """Give the row; read both outputs to their ends, or for a moment after the program's."""
    given, out, err = process.stdin, process.stdout, process.stderr
    assert given is not None and out is not None and err is not None
    output, errors = bytearray(), bytearray()

    async def give() -> None:
        with suppress(ConnectionError):  # it need not read the row
            if not given.is_closing():  # it may have ended, and uvloop raises no ConnectionError
                given.write(row + b"\n")
                await given.drain()
            given.close()

    async def read(stream: asyncio.StreamReader, found: bytearray) -> None:
        while part := await stream.read(1 << 16):
            found += part
            del found[:-_LARGEST_OUTPUT]

    work = [asyncio.ensure_future(one) for one in (give(), read(out, output), read(err, errors))]
    try:
        while process.returncode is None and not all(one.done() for one in work):
            await asyncio.wait(work, timeout=_OUTPUT_SECONDS)
        await process.wait()
        kill_group(process.pid)  # what it has started may hold the outputs open
        await asyncio.wait(work, timeout=_OUTPUT_SECONDS)  # what has left its group still may
    finally:
        for one in work:
            one.cancel()
    return bytes(output), bytes(errors)


def _last_lines(text: str) -> str:
    """Return the last lines that `_SHOWN_ERROR` characters hold; the last one in any case.

    Stack frames of Node.js, which follow its message, are left out.
    """
    lines = [line for line in text.splitlines() if not _STACK_FRAME.match(line)]
    last = lines.pop()[:_SHOWN_ERROR] if lines else "it printed no error"
    while lines and len(last) + len(lines[-1]) < _SHOWN_ERROR:
        last = f"{lines.pop()}\n{last}"
    return last


def _last_line(output: bytes, where: str) -> Any:
    lines = output.decode(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if line.strip()), "null")
    try:
        returned = json.loads(last)
    except ValueError as error:
        raise EnvironmentFault(
            f"{where} printed {short_repr(last)} at last; that must be its reward: a number, "
            "[number, {name: number}] or null"
        ) from error
    return tuple(returned) if isinstance(returned, list) else returned
