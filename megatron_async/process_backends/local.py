"""Provides the local process backend: objects in processes of this machine, over Unix sockets.

The backend has a private directory (files/private_directory.py). In it, the socket of an object has
the object's name.

Invariants
- An object's socket exists from before the start of its process until the process is dead and not
  started again. A call waits in the socket while the process starts or is restarted.
- A process has a separate session and a lifeline to its starter. `end` also kills all processes
  that it started.
- A process that repeatedly dies soon after its start is restarted after ever longer pauses.
"""

import asyncio
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import psutil

from megatron_async.errors import ComponentFailure, cause_in_log, describe_exit
from megatron_async.files.bounded_log import BoundedLog
from megatron_async.files.disk import writing
from megatron_async.files.private_directory import private_directory
from megatron_async.process_backends import sockets
from megatron_async.process_backends.backend import (
    MethodCall,
    RemoteObjectDead,
    RemoteObjectLost,
    T,
)
from megatron_async.process_backends.child_process import (
    ChildProcess,
    kill_group,
    module_command,
    wait_until_ended,
)
from megatron_async.process_backends.remote_object import RemoteCalls, request_of
from megatron_async.runtime.time_limits import AwakeTimeout

VISIBLE_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"
_END_SECONDS: Final = 10.0
_OUTPUT_SECONDS: Final = 1.0
_SOON_SECONDS: Final = 10.0
_PAUSES: Final = (0.1, 10.0)
"""First and longest pause in seconds before a restart; each pause is twice the one before."""


@contextmanager
def local_backend(logs: Path, gpus: str | None = None) -> "Iterator[LocalBackend]":
    """Create a local process backend for the block; at its end, all processes are killed.

    Args:
        logs: Folder for the logs of the processes.
        gpus: GPUs that processes may use, in the form of CUDA_VISIBLE_DEVICES; None for the GPUs of
            this process.
    """
    with private_directory() as directory:
        backend = LocalBackend(directory, logs, gpus)
        try:
            yield backend
        finally:
            backend.close()


def visible_gpus() -> list[str]:
    """Return the names of the GPUs that this process can use, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get(VISIBLE_VARIABLE)
    if visible is not None:
        return [name.strip() for name in visible.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


class LocalBackend:
    """Process backend of this machine (implements `ProcessBackend`). It is thread-safe."""

    one_machine = True

    def __init__(self, directory: Path, logs: Path, gpus: str | None = None) -> None:
        """Create a backend with sockets in `directory` and logs in `logs`; see `local_backend`."""
        self.address = f"local:{directory}"
        self._directory, self._logs, self._gpus = directory, logs, gpus
        self._free: list[str] | None = None if gpus is None else gpus.split(",")
        self._started: list[_Process] = []
        self._lock = threading.Lock()

    def start(
        self,
        what: Callable[..., T],
        *arguments: Any,
        name: str,
        restarts: int = 0,
        gpus: int = 0,
        here: bool = False,
    ) -> "LocalRemoteObject[T]":
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        # With more threads, the processes of this machine would compete for its cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
        reserved = self._reserve_gpus(gpus, name)
        if visible := (",".join(reserved) if gpus else self._gpus):
            environment[VISIBLE_VARIABLE] = visible
        process = _Process(
            self._directory / name,
            pickle.dumps((what, arguments)),
            self._logs / f"{name}.log",
            environment,
            restarts,
            lambda: self._release_gpus(reserved),
        )
        self._started.append(process)
        return LocalRemoteObject(self._directory / name, self._logs, process)

    def find(self, name: str, what: Callable[..., T]) -> "LocalRemoteObject[T]":
        return LocalRemoteObject(self._directory / name, self._logs)

    def close(self) -> None:
        # The stack ends the other processes even if an interrupt comes while it ends one of them.
        with ExitStack() as ends:
            for process in self._started:
                ends.callback(process.end)

    def _reserve_gpus(self, count: int, name: str) -> list[str]:
        """Reserve `count` free GPUs for the object `name`, and return their names.

        Raises:
            ComponentFailure: Fewer than `count` GPUs are free.
        """
        if not count:
            return []
        with self._lock:
            if self._free is None:
                self._free = visible_gpus()
            if count > len(self._free):
                raise ComponentFailure(f"{name} needs {count} GPUs, but {len(self._free)} are free")
            reserved, self._free = self._free[:count], self._free[count:]
            return reserved

    def _release_gpus(self, reserved: list[str]) -> None:
        """Make reserved GPUs free again, after their process is dead."""
        with self._lock:
            if reserved:
                self._free = sorted([*(self._free or []), *reserved])


class LocalRemoteObject(RemoteCalls[T]):
    """Handle to an object in a process of this machine (implements `RemoteObject`)."""

    def __init__(self, path: Path, logs: Path, process: "_Process | None" = None) -> None:
        """Create a handle.

        Args:
            path: Path of the object's socket, whose file name is the object's name.
            logs: Folder with the log of the object's process.
            process: The object's process; None if another process started it.
        """
        super().__init__(path.name, str(logs / f"{path.name}.log"))
        self._path, self._process = path, process

    async def _called(self, call: MethodCall, limit: float) -> Any:
        deaths = self._deaths()
        try:
            async with AwakeTimeout(limit):
                reply = await sockets.call(self._path, request_of(call))
        except TimeoutError as error:
            raise self._late(call, limit) from error
        except sockets.Broken as error:
            raise await asyncio.to_thread(self._lost, call.method, deaths) from error
        return self._result(reply, call)

    def end(self) -> None:
        if self._process is not None:
            self._process.end()

    def _deaths(self) -> int:
        return 0 if self._process is None else self._process.deaths

    def _lost(self, method: str, deaths: int) -> ComponentFailure:
        """Return the error for a call of `method` whose connection broke; it says why.

        The connection of a dying process breaks a moment before the process has ended. So this
        method waits for the end, to name the cause of death. `deaths` is how often the process had
        died before the call.
        """
        # Check the socket before the process: when a process dies, the watcher marks it as dead and
        # then removes the socket. So if the socket is missing but the process is not marked,
        # something else has removed the socket.
        removed = not self._path.exists()
        if removed and self._process is not None and self._process.runs:
            return ComponentFailure(
                f"{self._path.name} can no longer be called (during the call `{method}`): its "
                f"socket {self._path} was removed while it ran. Exclude {self._path.parent.parent} "
                "from the program that cleans up temporary files, and continue with --resume."
            )
        why = f", or its socket {self._path} was removed"
        if self._process is not None:
            why = self._process.death_after(deaths)
        message = f"{self._path.name} has died during the call `{method}`{why}"
        return RemoteObjectLost(message) if self._path.exists() else RemoteObjectDead(message)


class _Process:
    """The process of a remote object, with a thread that watches and restarts the process.

    Attributes:
        deaths: How often the process has died.
    """

    def __init__(
        self,
        path: Path,
        content: bytes,
        log: Path,
        environment: dict[str, str],
        restarts: int,
        ended: Callable[[], None],
    ) -> None:
        """Create the socket, and start the process.

        Args:
            path: Path of the socket.
            content: The pickled class and arguments of the object.
            log: File for the output of the process.
            environment: Environment variables of the process.
            restarts: How often the process is started again after it died.
            ended: Called once the process is dead and is not started again.
        """
        self._path, self._content, self._log = path, content, log
        self._environment, self._restarts, self._ended = environment, restarts, ended
        self._ending = self._dead = False
        self.deaths, self._why = 0, ""
        self._pause = 0.0
        self._changed = threading.Condition()
        self._listening = sockets.listen(path)
        try:
            self._spawn()
        except BaseException:
            self._close()
            raise
        self._watch = threading.Thread(target=self._supervise, name=path.name, daemon=True)
        self._watch.start()

    @property
    def runs(self) -> bool:
        """Whether the process is running."""
        return not self._dead and self._running.returncode is None

    def _spawn(self) -> None:
        """Start the process, with the pickled object as its standard input and a log of its output.

        Raises:
            ComponentFailure: The process cannot be started.
        """
        stdin = os.memfd_create(self._path.name)
        os.write(stdin, self._content)
        os.lseek(stdin, 0, os.SEEK_SET)
        number = self._listening.fileno()
        self._began = time.monotonic()
        try:
            with writing(self._log):
                self._output = BoundedLog(self._log)
            try:
                self._running = ChildProcess(
                    module_command(
                        "megatron_async.process_backends.host", self._path.name, str(number)
                    ),
                    lifeline=True,
                    env=self._environment,
                    stdin=stdin,
                    stdout=self._output.sink,
                    stderr=self._output.sink,
                    pass_fds=(number,),
                )
            except BaseException:
                self._output.discard()
                raise
            try:
                self._output.start()
            except BaseException:
                self._running.end(0)
                raise
        except OSError as error:
            raise ComponentFailure(
                f"{self._path.name} cannot be started: {error.strerror}"
            ) from error
        finally:
            os.close(stdin)

    def _supervise(self) -> None:
        """Wait until the process ends and start it again; repeat until no restart is permitted."""
        while True:
            code = self._running.reap()
            with self._changed:
                self.deaths, self._why = self.deaths + 1, self._explanation(code)
                self._changed.notify_all()
                if self._ending or not self._restarts or self._ended_in_pause():
                    return self._close()
                self._restarts -= 1
                try:
                    self._spawn()
                except (OSError, ComponentFailure) as error:
                    self._why += f"; it cannot be started again: {error}"
                    return self._close()

    def _ended_in_pause(self) -> bool:
        """Pause before a restart if the process died soon after its start.

        Returns:
            Whether `end` was called, so that the process must not be started again.
        """
        first, longest = _PAUSES
        soon = time.monotonic() - self._began < _SOON_SECONDS
        self._pause = min(max(2 * self._pause, first), longest) if soon else 0.0
        return self._changed.wait_for(lambda: self._ending, self._pause)

    def _close(self) -> None:
        """Mark the process as dead without a restart; remove its socket, so that all calls fail."""
        self._dead = True
        self._path.unlink(missing_ok=True)
        self._listening.close()
        self._ended()

    def _explanation(self, code: int) -> str:
        """Return how the process ended, from its exit `code` and log, as the end of a message."""
        cause = cause_in_log(self._output.tail(_OUTPUT_SECONDS)) or ""
        return f": it {describe_exit(code)}{f', {cause}' if cause else ''}; its log is {self._log}"

    def death_after(self, deaths: int) -> str:
        """Return why the process last died, as the end of a message.

        If it has died only `deaths` times so far, wait up to `_END_SECONDS` for the next death.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._dead or self.deaths > deaths, _END_SECONDS)
            return self._why

    def end(self) -> None:
        """Kill the process and its descendants, and wait until they have ended: up to
        `_END_SECONDS` for the descendants, then up to `_END_SECONDS` for the process."""
        with self._changed:
            ended_before, self._ending = self._ending, True
            self._changed.notify_all()
            descendants: list[psutil.Process] = []
            if not ended_before and self._running.returncode is None:
                with suppress(psutil.Error):
                    descendants = psutil.Process(self._running.pid).children(recursive=True)
                kill_group(self._running.pid)
        for process in descendants:
            with suppress(psutil.Error):
                process.kill()
        wait_until_ended(descendants, _END_SECONDS)
        self._watch.join(_END_SECONDS)
