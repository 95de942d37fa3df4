"""Tests the contract of process backends for local processes and for Ray actors."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from megatron_async.errors import ComponentFailure, ProcessKilled, UserError
from megatron_async.process_backends.backend import (
    CallFailed,
    CallTimeout,
    ProcessBackend,
    RemoteObject,
    RemoteObjectDead,
    RemoteObjectLost,
)
from megatron_async.process_backends.local import local_backend
from tests.process_backends.subject import Subject

LIMIT = 60.0
LARGE_BYTES = 100 << 20


@dataclass
class Suite:
    """A process backend, and the remote objects of one test, whose names are unique."""

    backend: ProcessBackend
    logs: Path
    remote: list[RemoteObject] = field(default_factory=list)

    def start(self, *arguments: Any, **options: Any) -> RemoteObject:
        options.setdefault("name", f"subject{time.monotonic_ns()}")
        self.remote.append(self.backend.start(Subject, *arguments, **options))
        return self.remote[-1]


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def backend(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProcessBackend]:
    folder = tmp_path_factory.mktemp("backend")
    if request.param == "local":
        with local_backend(folder, gpus="3,5") as found:
            yield found
        return
    pytest.importorskip("ray")
    from megatron_async.process_backends.on_ray import ray_backend

    with pytest.MonkeyPatch.context() as patch:
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
            # A variable that was set here is restored when the patch ends.
            patch.setenv(name, "")
        with ray_backend(None, folder / "token", gpus="3,5") as opened:
            yield opened


@pytest.fixture
def suite(backend: ProcessBackend, tmp_path: Path) -> Iterator[Suite]:
    made = Suite(backend, tmp_path)
    yield made
    for remote in made.remote:
        remote.end()


def until(condition: Callable[[], Any], seconds: float = LIMIT) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def visible(subject: Subject) -> Any:
    return subject.variable("CUDA_VISIBLE_DEVICES")


def calls(
    remote: RemoteObject[Subject], what: Callable[[Subject], Any], limit: float = LIMIT
) -> list[Callable[[], Any]]:
    """Return functions that make the same call, blocking and asynchronously."""
    return [
        lambda: remote.call_blocking(what, limit=limit),
        lambda: asyncio.run(remote.call(what, limit=limit)),
    ]


def test_call_waits_for_the_start_of_a_separate_process(suite: Suite) -> None:
    remote = suite.start()
    for call in calls(remote, lambda one: one.pid()):
        assert call() not in (os.getpid(), None)
    for call in calls(remote, lambda one: one.echo({"a": [1, None]})):
        assert call() == {"a": [1, None]}


def test_call_raises_project_errors_unchanged_and_others_as_call_failed(suite: Suite) -> None:
    remote = suite.start()
    for call in calls(remote, lambda one: one.fail()):
        with pytest.raises(ComponentFailure, match=r"^the disk is gone$"):
            call()
    for call in calls(remote, lambda one: one.err()):
        with pytest.raises(
            CallFailed, match=r"failed in err: KeyError: .*nobody's.*; its traceback is in /"
        ):
            call()


def test_every_call_raises_the_error_when_the_object_cannot_be_built(suite: Suite) -> None:
    remote = suite.start("a setting is wrong")
    for call in calls(remote, lambda one: one.pid()):
        with pytest.raises(UserError, match=r"^a setting is wrong$"):
            call()


def test_calls_of_one_object_run_concurrently(suite: Suite, tmp_path: Path) -> None:
    remote = suite.start()

    async def all_at_once() -> float:
        await remote.call(lambda one: one.pid(), limit=LIMIT)
        began = time.monotonic()
        files = [tmp_path / str(number) for number in range(5)]
        waits = [
            remote.call(lambda one, file=file: one.write_after(1.0, file), limit=LIMIT)
            for file in files
        ]
        await asyncio.gather(*waits)
        assert all(file.exists() for file in files)
        return time.monotonic() - began

    assert asyncio.run(all_at_once()) < 4


def test_running_and_later_calls_raise_when_the_process_dies(suite: Suite) -> None:
    remote = suite.start()
    pid = remote.call_blocking(lambda one: one.pid(), limit=LIMIT)

    async def killed_meanwhile() -> None:
        call = asyncio.create_task(
            remote.call(lambda one: one.write_after(300, Path("/x")), limit=LIMIT)
        )
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        await call

    began = time.monotonic()
    with pytest.raises(ProcessKilled, match=r"has died"):
        asyncio.run(killed_meanwhile())
    for call in calls(remote, lambda one: one.pid()):
        with pytest.raises(RemoteObjectDead):
            call()
    assert time.monotonic() - began < 30


def test_process_is_restarted_as_often_as_permitted(suite: Suite) -> None:
    remote = suite.start(restarts=2)
    seen = set()
    for _ in range(3):

        def answered() -> bool:
            try:
                seen.add(remote.call_blocking(lambda one: one.pid(), limit=LIMIT))
            except RemoteObjectDead:
                raise
            except RemoteObjectLost:
                return False
            return True

        until(answered)
        os.kill(max(seen, key=lambda pid: (not has_ended(pid), pid)), signal.SIGKILL)
        until(lambda: all(map(has_ended, seen)))
    assert len(seen) == 3

    def dead() -> bool:
        try:
            remote.call_blocking(lambda one: one.pid(), limit=LIMIT)
        except RemoteObjectDead:
            return True
        except RemoteObjectLost:
            return False
        raise AssertionError("a fourth process")

    until(dead)


def test_method_continues_when_its_call_times_out(suite: Suite, tmp_path: Path) -> None:
    remote = suite.start()
    remote.call_blocking(lambda one: one.pid(), limit=LIMIT)
    for number in range(2):
        file = tmp_path / str(number)
        began = time.monotonic()
        with pytest.raises(CallTimeout, match=r"write_after within 0.5 s"):
            calls(remote, lambda one, file=file: one.write_after(2.0, file), 0.5)[number]()
        assert time.monotonic() - began < 1.9
        late = remote.call_blocking(lambda one: one.echo(7), limit=LIMIT)
        assert late == 7, "another call got the late reply"
        until(file.exists, 20)


def test_method_continues_when_its_call_is_canceled(suite: Suite, tmp_path: Path) -> None:
    remote, file = suite.start(), tmp_path / "file"

    async def cancel() -> None:
        await remote.call(lambda one: one.pid(), limit=LIMIT)
        call = asyncio.create_task(remote.call(lambda one: one.write_after(2.0, file), limit=LIMIT))
        await asyncio.sleep(0.5)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel())
    assert not file.exists()
    until(file.exists, 20)


def test_blocking_call_ends_when_while_waiting_raises(suite: Suite, tmp_path: Path) -> None:
    remote, file = suite.start(), tmp_path / "file"
    remote.call_blocking(lambda one: one.pid(), limit=LIMIT)

    def stop() -> None:
        raise InterruptedError

    began = time.monotonic()
    with pytest.raises(InterruptedError):
        remote.call_blocking(
            lambda one: one.write_after(3.0, file), limit=LIMIT, while_waiting=stop
        )
    assert time.monotonic() - began < 2.5
    until(file.exists, 20)


def a_caller(suite: Suite, name: str, limit: float, seconds: float, file: Path) -> Any:
    """Start a process that calls `write_after` of the object `name`, and wait until it has."""
    caller = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.process_backends.subject",
            suite.backend.address,
            name,
            *map(str, (limit, seconds, file)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert caller.stdout is not None and caller.stdout.readline() == "asking\n"
    time.sleep(1.5)
    return caller


def test_method_continues_when_the_process_of_its_caller_is_killed(
    suite: Suite, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    suite.start(name="survivor", here=True).call_blocking(lambda one: one.pid(), limit=LIMIT)
    caller = a_caller(suite, "survivor", LIMIT, 4.0, file)
    assert not file.exists()
    caller.kill()
    caller.communicate(timeout=10)
    until(file.exists, 20)


def test_call_limit_does_not_count_time_in_which_the_caller_is_stopped(
    suite: Suite, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    suite.start(name="patient", here=True).call_blocking(lambda one: one.pid(), limit=LIMIT)
    caller = a_caller(suite, "patient", 6.0, 3.0, file)
    caller.send_signal(signal.SIGSTOP)
    time.sleep(8.0)
    caller.send_signal(signal.SIGCONT)
    assert caller.communicate(timeout=20)[0] == "written\n"


def test_call_raises_lost_when_no_object_has_the_name(suite: Suite) -> None:
    for call in calls(suite.backend.find("nobody", Subject), lambda one: one.pid()):
        with pytest.raises(RemoteObjectLost):
            call()


def test_call_transfers_arguments_and_results_of_100_megabytes(suite: Suite) -> None:
    remote = suite.start()
    large = np.arange(LARGE_BYTES // 8)
    for call in calls(remote, lambda one: one.echo(large)):
        assert np.array_equal(call(), large)


def test_end_kills_child_processes_of_the_object(suite: Suite) -> None:
    remote = suite.start(restarts=3)
    pids = [
        remote.call_blocking(lambda one: one.pid(), limit=LIMIT),
        remote.call_blocking(lambda one: one.start_process(), limit=LIMIT),
    ]
    remote.end()
    remote.end()
    until(lambda: all(map(has_ended, pids)), 10)


def test_child_processes_end_when_the_object_dies(suite: Suite) -> None:
    """Programs that the user's code starts do not watch a lifeline."""
    remote = suite.start()
    pids = [
        remote.call_blocking(lambda one: one.pid(), limit=LIMIT),
        remote.call_blocking(lambda one: one.start_process(), limit=LIMIT),
    ]
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: all(map(has_ended, pids)), 20)


def test_remote_objects_of_an_object_end_when_it_is_killed(suite: Suite, tmp_path: Path) -> None:
    owner = suite.start()
    pids = owner.call_blocking(
        lambda one: one.start_another(suite.backend.address, tmp_path), limit=LIMIT
    )
    os.kill(owner.call_blocking(lambda one: one.pid(), limit=LIMIT), signal.SIGKILL)
    until(lambda: all(map(has_ended, pids)), 20)


def test_gpus_are_exclusive_and_free_again_when_their_object_ends(suite: Suite) -> None:
    for _ in range(2):
        pair = [suite.start(gpus=1) for _ in range(2)]
        seen = [remote.call_blocking(visible, limit=LIMIT) for remote in pair]
        assert sorted(seen) == ["3", "5"]
        for remote in pair:
            remote.end()
    both = suite.start(gpus=2).call_blocking(visible, limit=LIMIT)
    assert sorted(both.split(",")) == ["3", "5"]
