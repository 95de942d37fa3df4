"""Tests the local process backend: access to its sockets, its files, restarts and cleanup."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from megatron_async.errors import ComponentFailure
from megatron_async.files.private_directory import user_directory
from megatron_async.process_backends import local
from megatron_async.process_backends.backend import (
    UNLIMITED,
    CallTimeout,
    RemoteObjectDead,
    RemoteObjectLost,
)
from megatron_async.process_backends.local import LocalBackend, local_backend
from tests.process_backends.subject import Subject
from tests.process_backends.test_contract import LIMIT, has_ended, until, visible

OPENER = """
import sys, time
from pathlib import Path
from megatron_async.process_backends.local import local_backend
from tests.process_backends.subject import Subject
with local_backend(Path(sys.argv[1])) as backend:
    remote = backend.start(Subject, name="subject", restarts=5, here=True)
    print(backend.address, remote.call_blocking(lambda one: one.pid(), limit=60), flush=True)
    time.sleep(600)
"""
OTHER_USER = """
import os, socket, sys
os.setgid(65534), os.setuid(65534)
opened = socket.socket(socket.AF_UNIX)
opened.settimeout(20)
opened.connect(sys.argv[1])
try:
    opened.sendall(bytes(7) + bytes([9]) + b"x" * 9)
    print(opened.recv(1))
except (BrokenPipeError, ConnectionResetError):
    print(b"")
"""


def directory_of(backend: LocalBackend) -> Path:
    return Path(backend.address.removeprefix("local:"))


def test_socket_directories_are_accessible_only_to_this_user(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend:
        for directory in (directory_of(backend), directory_of(backend).parent):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
def test_socket_sends_no_reply_to_another_user(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend:
        backend.start(Subject, name="subject").call_blocking(lambda one: one.pid(), limit=LIMIT)
        directory = directory_of(backend)
        try:
            for opened in (directory.parent, directory, directory / "subject"):
                opened.chmod(0o777)
            command = [sys.executable, "-c", OTHER_USER, str(directory / "subject")]
            found = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert found.stdout == "b''\n", found.stderr
        finally:
            directory.parent.chmod(0o700)


def test_end_waits_for_descendants_when_they_are_in_another_process_group(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend:
        pid = backend.start(Subject, name="subject").call_blocking(
            lambda one: one.start_large(), limit=LIMIT
        )
    assert has_ended(pid)


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_no_process_or_directory_remains_when_the_opener_is_killed(
    tmp_path: Path, stopped: bool
) -> None:
    opener = subprocess.Popen(
        [sys.executable, "-c", OPENER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert opener.stdout is not None
    address, pid = opener.stdout.readline().split()
    left = Path(address.removeprefix("local:"))
    if stopped:
        process = psutil.Process(int(pid))
        process.suspend()
        until(lambda: process.status() == psutil.STATUS_STOPPED)
    opener.kill()
    opener.communicate(timeout=20)
    until(lambda: has_ended(int(pid)), 10)
    with local_backend(tmp_path) as backend:
        assert not left.exists() and directory_of(backend).exists()
        with local_backend(tmp_path):
            assert directory_of(backend).exists(), "the directory of a running process was removed"


@pytest.mark.parametrize("what", ["socket", "directory"])
def test_call_names_the_socket_when_it_was_removed(tmp_path: Path, what: str) -> None:
    """A cleaner of /tmp may remove it. Callers that found the object by name get an error too."""
    with local_backend(tmp_path) as backend:
        remote = backend.start(Subject, name="subject")
        remote.call_blocking(lambda one: one.pid(), limit=LIMIT)
        socket_file = directory_of(backend) / "subject"
        found = backend.find("subject", Subject)
        if what == "socket":
            socket_file.unlink()
        else:
            shutil.rmtree(socket_file.parent)
        sentence = (
            rf"subject can no longer be called \(during the call `pid`\): its "
            rf"socket {socket_file} was removed while it ran\. Exclude "
            r"/tmp/megatron-async-\d+ from the program"
        )
        with pytest.raises(ComponentFailure, match=sentence):
            remote.call_blocking(lambda one: one.pid(), limit=LIMIT)
        died = rf"subject has died during the call `pid`, or its socket {socket_file} was removed"
        with pytest.raises(RemoteObjectDead, match=died):
            found.call_blocking(lambda one: one.pid(), limit=LIMIT)


def test_call_error_names_the_death_when_the_socket_is_removed_meanwhile(
    tmp_path: Path,
) -> None:
    """The watcher removes the socket between the two checks of the error's explanation."""
    path = tmp_path / "subject"

    class Ending:
        deaths = 0

        @property
        def runs(self) -> bool:
            path.unlink()
            return True

        def death_after(self, deaths: int) -> str:
            path.unlink(missing_ok=True)
            return ": it was killed"

    path.touch()
    called = local.LocalRemoteObject(path, tmp_path, Ending())  # type: ignore[arg-type]
    found = called._lost("pid", 0)
    assert isinstance(found, RemoteObjectDead) and "subject has died" in str(found)


def test_log_size_is_limited_when_a_process_prints_much(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend:
        remote = backend.start(Subject, name="subject")
        remote.call_blocking(lambda one: one.flood(9), limit=LIMIT)
    logs = list(tmp_path.glob("subject.log*"))
    assert sum(log.stat().st_size for log in logs) <= 2 << 20
    assert (tmp_path / "subject.log").read_text().endswith("last words")


def test_call_error_names_the_cause_of_the_latest_death(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend:
        remote = backend.start(Subject, name="subject", restarts=1)
        for ending in (signal.SIGKILL, signal.SIGTERM):
            process = psutil.Process(remote.call_blocking(lambda one: one.pid(), limit=LIMIT))

            def kill(process: psutil.Process = process, ending: signal.Signals = ending) -> None:
                process.send_signal(ending)

            with pytest.raises(RemoteObjectLost, match=f"was killed by {ending.name}"):
                remote.call_blocking(lambda one: one.block(300), limit=LIMIT, while_waiting=kill)


def test_restart_pauses_grow_when_a_process_dies_at_start(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend:
        file = tmp_path / "lives"
        backend.start(_DiesAtOnce, file, name="subject", restarts=UNLIMITED)
        lives: list[list[float]] = []

        def come() -> bool:
            text = file.read_text() if file.exists() else ""
            lives[:] = [[float(word) for word in line.split()] for line in text.splitlines()]
            return len(lives) >= 6

        until(come, LIMIT)
        began = time.monotonic()
    assert time.monotonic() - began < 5, "the end does not wait for a pause"
    # Start times and end times come from different clocks.
    gaps = [after[0] - before[1] for before, after in pairwise(lives)]
    assert gaps[4] - gaps[0] > 1.2


class _DiesAtOnce:
    def __init__(self, file: Path) -> None:
        with file.open("a") as opened:
            opened.write(f"{psutil.Process().create_time()} {time.time()}\n")
        os._exit(3)


def test_processes_started_concurrently_get_different_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two() -> list[str]:
        time.sleep(0.5)
        return ["0", "1"]

    monkeypatch.setattr(local, "visible_gpus", two)
    with local_backend(tmp_path) as backend, ThreadPoolExecutor(2) as threads:
        remote = threads.map(lambda name: backend.start(Subject, name=name, gpus=1), "ab")
        found = {one.call_blocking(visible, limit=LIMIT) for one in remote}
    assert found == {"0", "1"}


def test_start_is_refused_when_too_few_gpus_are_free(tmp_path: Path) -> None:
    with local_backend(tmp_path, gpus="3,5") as backend:
        backend.start(Subject, name="first", gpus=1)
        with pytest.raises(ComponentFailure, match=r"^second needs 2 GPUs, but 1 are free$"):
            backend.start(Subject, name="second", gpus=2)


def test_process_without_own_gpus_sees_all_gpus_of_the_backend(tmp_path: Path) -> None:
    with local_backend(tmp_path, gpus="3,5") as backend:
        remote = backend.start(Subject, name="subject")
        assert remote.call_blocking(visible, limit=LIMIT) == "3,5"


def test_user_directory_is_refused_when_another_user_owns_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    path = Path("/tmp/megatron-async-4711")
    try:
        with pytest.raises(Exception, match=rf"{path}.*is not a directory of this user"):
            user_directory("megatron-async")
    finally:
        path.rmdir()


def test_start_replaces_the_socket_file_of_an_earlier_process(tmp_path: Path) -> None:
    with local_backend(tmp_path) as backend, socket.socket(socket.AF_UNIX) as left:
        left.bind(str(directory_of(backend) / "subject"))
        assert (
            backend.start(Subject, name="subject").call_blocking(
                lambda one: one.echo(1), limit=LIMIT
            )
            == 1
        )


def test_process_is_restarted_when_its_log_was_removed(tmp_path: Path) -> None:
    """Another program removed the log, so the error does not name a cause."""
    with local_backend(tmp_path) as backend:
        remote = backend.start(Subject, name="subject", restarts=1)
        for _ in range(2):
            psutil.Process(remote.call_blocking(lambda one: one.pid(), limit=LIMIT)).kill()
            (tmp_path / "subject.log").unlink()
            until(lambda: (tmp_path / "subject.log").exists() or not _socket(backend).exists(), 20)
        with pytest.raises(RemoteObjectDead, match="subject has died"):
            remote.call_blocking(lambda one: one.pid(), limit=LIMIT)


def test_process_is_restarted_when_other_code_reaped_it(tmp_path: Path) -> None:
    """User code may wait for any child of the process; ignoring SIGCHLD has the same effect."""
    with local_backend(tmp_path) as backend:
        remote = backend.start(Subject, name="subject", restarts=1)
        process = psutil.Process(remote.call_blocking(lambda one: one.pid(), limit=LIMIT))
        before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            process.kill()
            until(lambda: not psutil.pid_exists(process.pid), 20)
        finally:
            signal.signal(signal.SIGCHLD, before)
        assert remote.call_blocking(lambda one: one.pid(), limit=LIMIT) != process.pid


def _socket(backend: LocalBackend) -> Path:
    return directory_of(backend) / "subject"


def test_start_error_leaves_no_open_files_when_the_system_refuses_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system refuses a process at its limit of processes or memory."""

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with local_backend(tmp_path) as backend:
        open_before = len(list(Path("/proc/self/fd").iterdir()))
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        why = r"^subject cannot be started: Resource temporarily unavailable"
        with pytest.raises(ComponentFailure, match=why):
            backend.start(Subject, name="subject")
        assert not _socket(backend).exists()
        assert len(list(Path("/proc/self/fd").iterdir())) == open_before


@pytest.mark.parametrize("waits", ["blocking", "asynchronous"])
def test_call_times_out_when_the_socket_accepts_no_more_calls(waits: str, tmp_path: Path) -> None:
    """Calls that have timed out stay in the queue of a stopped process."""
    with local_backend(tmp_path) as backend, ExitStack() as callers:
        remote = backend.start(Subject, name="subject")
        stopped = psutil.Process(remote.call_blocking(lambda one: one.pid(), limit=LIMIT))
        stopped.suspend()
        with suppress(BlockingIOError):
            for _ in range(10_000):
                caller = callers.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(str(_socket(backend)))
        with pytest.raises(CallTimeout):
            if waits == "blocking":
                remote.call_blocking(lambda one: one.pid(), limit=1)
            else:
                asyncio.run(remote.call(lambda one: one.pid(), limit=1))
        stopped.resume()
        assert remote.call_blocking(lambda one: one.echo(1), limit=LIMIT) == 1
