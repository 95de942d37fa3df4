"""The local backend: each object is a process of this machine, called over a Unix socket.

In a directory of its own (files/private_directory.py), the socket of what was started under a name
has that name.

Invariants
- A socket is there from before its process is started until it has died for good: a call waits in
  it while the process starts, or is started again.
- A process has a session of its own and a lifeline to its starter; `end` kills what it started too.
- One that dies again and again soon after its start is started again ever more slowly.
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
_PAUSES: Final = (0.1, 10.0)  # seconds; the first is doubled up to the last


@contextmanager
def local_backend(logs: Path, gpus: str | None = None) -> "Iterator[LocalBackend]":
    """A place of this machine, ended with the block.

    `gpus`: those that may be used, as in CUDA_VISIBLE_DEVICES; None: those of this process.
    """
    with private_directory() as directory:
        backend = LocalBackend(directory, logs, gpus)
        try:
            yield backend
        finally:
            backend.close()


def visible_gpus() -> list[str]:
    """GPUs of this process, as CUDA_VISIBLE_DEVICES names them."""
    given = os.environ.get(VISIBLE_VARIABLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip()]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


class LocalBackend:
    """Processes of this machine (`Place`). For several threads."""

    one_machine = True

    def __init__(self, directory: Path, logs: Path, gpus: str | None = None) -> None:
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
        environment.setdefault("OMP_NUM_THREADS", "1")  # more would fight the other processes
        taken = self._take(gpus, name)
        if visible := (",".join(taken) if gpus else self._gpus):
            environment[VISIBLE_VARIABLE] = visible
        process = _Process(
            self._directory / name,
            pickle.dumps((what, arguments)),
            self._logs / f"{name}.log",
            environment,
            restarts,
            lambda: self._give_back(taken),
        )
        self._started.append(process)
        return LocalRemoteObject(self._directory / name, self._logs, process)

    def find(self, name: str, what: Callable[..., T]) -> "LocalRemoteObject[T]":
        return LocalRemoteObject(self._directory / name, self._logs)

    def close(self) -> None:
        with ExitStack() as ends:  # all of them, also when an interrupt comes at one
            for process in self._started:
                ends.callback(process.end)

    def _take(self, count: int, name: str) -> list[str]:
        if not count:
            return []
        with self._lock:
            if self._free is None:
                self._free = visible_gpus()
            if count > len(self._free):
                raise ComponentFailure(f"{name} needs {count} GPUs, and {len(self._free)} are free")
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def _give_back(self, taken: list[str]) -> None:
        with self._lock:
            if taken:
                self._free = sorted([*(self._free or []), *taken])


class LocalRemoteObject(RemoteCalls[T]):
    """An object in a process of this machine (`Placed`); `process`: if it was started here."""

    def __init__(self, path: Path, logs: Path, process: "_Process | None" = None) -> None:
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
        """Explain a broken connection, which comes a moment before the end of its process.

        `deaths`: those before the call.
        """
        # The socket first: the watcher marks a dead process before it removes the process's socket.
        removed = not self._path.exists()
        if removed and self._process is not None and self._process.runs:
            return ComponentFailure(
                f"{self._path.name} cannot be called any more (waiting for {method}): its socket "
                f"{self._path} was removed while it ran; exclude {self._path.parent.parent} from "
                "what cleans up temporary files, and go on with --resume"
            )
        why = f", or its socket {self._path} was removed"
        if self._process is not None:
            why = self._process.death_after(deaths)
        message = f"{self._path.name} has died (waiting for {method}){why}"
        return RemoteObjectLost(message) if self._path.exists() else RemoteObjectDead(message)


class _Process:
    """The process of an object, started again as often as it may be; watched by a thread."""

    def __init__(
        self,
        path: Path,
        content: bytes,
        log: Path,
        environment: dict[str, str],
        restarts: int,
        ended: Callable[[], None],
    ) -> None:
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
        self._watch = threading.Thread(target=self._look_after, name=path.name, daemon=True)
        self._watch.start()

    @property
    def runs(self) -> bool:
        """Return whether the process is still running."""
        return not self._dead and self._running.returncode is None

    def _spawn(self) -> None:
        """Start the process."""
        given = os.memfd_create(self._path.name)
        os.write(given, self._content)
        os.lseek(given, 0, os.SEEK_SET)
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
                    stdin=given,
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
            os.close(given)

    def _look_after(self) -> None:
        while True:
            code = self._running.reap()
            with self._changed:
                self.deaths, self._why = self.deaths + 1, self._how(code)
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
        """Wait before it is started again, if it has died soon; return whether `end` came."""
        first, longest = _PAUSES
        soon = time.monotonic() - self._began < _SOON_SECONDS
        self._pause = min(max(2 * self._pause, first), longest) if soon else 0.0
        return self._changed.wait_for(lambda: self._ending, self._pause)

    def _close(self) -> None:
        """Let nobody's call wait any longer: it is dead for good."""
        self._dead = True
        self._path.unlink(missing_ok=True)
        self._listening.close()
        self._ended()

    def _how(self, code: int) -> str:
        cause = cause_in_log(self._output.tail(_OUTPUT_SECONDS)) or ""
        return f": it {describe_exit(code)}{f', {cause}' if cause else ''}; its log is {self._log}"

    def death_after(self, deaths: int) -> str:
        """Explain its last death; waits a moment for one after so many."""
        with self._changed:
            self._changed.wait_for(lambda: self._dead or self.deaths > deaths, _END_SECONDS)
            return self._why

    def end(self) -> None:
        """Kill the process and its descendants; wait until they have ended, within a limit."""
        with self._changed:
            ended_before, self._ending = self._ending, True
            self._changed.notify_all()
            left: list[psutil.Process] = []
            if not ended_before and self._running.returncode is None:
                with suppress(psutil.Error):
                    left = psutil.Process(self._running.pid).children(recursive=True)
                kill_group(self._running.pid)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        wait_until_ended(left, _END_SECONDS)
        self._watch.join(_END_SECONDS)
