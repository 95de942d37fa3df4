"""Provides the remote object of these tests.

As a program, the module calls the object from a separate process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from megatron_async.errors import ComponentFailure, UserError
from megatron_async.process_backends.addresses import connect_backend
from megatron_async.process_backends.backend import ProcessBackend, RemoteObject


class Subject:
    """A remote object whose methods misbehave as a test requests."""

    def __init__(self, refuses: str = "") -> None:
        if refuses:
            raise UserError(refuses)
        self._placed: list[RemoteObject] = []

    async def flood(self, megabytes: int) -> None:
        """Print `megabytes` MiB to standard output, then `last words` to standard error."""
        for _ in range(megabytes):
            print("x" * (1 << 20))
        os.write(2, b"last words")

    async def pid(self) -> int:
        return os.getpid()

    async def echo(self, value: Any) -> Any:
        return value

    async def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    async def fail(self) -> None:
        raise ComponentFailure("the disk is gone")

    async def err(self) -> None:
        raise KeyError("nobody's")

    async def run_dry(self) -> None:
        next(iter(()))

    async def write_after(self, seconds: float, file: Path) -> str:
        await asyncio.sleep(seconds)
        file.write_text("done")
        return "written"

    async def block(self, seconds: float) -> tuple[float, float]:
        began = time.monotonic()
        time.sleep(seconds)
        return began, time.monotonic()

    async def start_process(self) -> int:
        return subprocess.Popen(["sleep", "600"]).pid

    async def start_large(self) -> int:
        """Start a process with 1 GiB of memory in a separate session, and return its ID.

        The kernel takes a moment to free the memory when the process ends.
        """
        code = "import time; held = b'x' * (1 << 30); print(flush=True); time.sleep(600)"
        command = [sys.executable, "-c", code]
        started = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        assert started.stdout is not None
        started.stdout.readline()
        return started.pid

    async def start_another(self, address: str, logs: Path) -> tuple[int, int]:
        """Start another `Subject` from this process, with a child process; return both IDs."""
        backend: ProcessBackend = connect_backend(address, logs)
        self._placed.append(backend.start(Subject, name="another"))
        pid = await self._placed[-1].call(lambda one: one.pid(), limit=60)
        return pid, await self._placed[-1].call(lambda one: one.start_process(), limit=60)


# python -m tests.process_backends.subject ADDRESS NAME LIMIT SECONDS FILE
if __name__ == "__main__":
    address, name, limit, seconds, file = sys.argv[1:]
    found = connect_backend(address, Path(file).parent).find(name, Subject)
    print("asking", flush=True)
    written = found.call_blocking(
        lambda one: one.write_after(float(seconds), Path(file)), limit=float(limit)
    )
    print(written, flush=True)
