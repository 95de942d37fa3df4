"""Tests that a file lock names its holder, and ends with the holder's process or the last share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_async.files.lock import FileLock, Holder, LockHeld

HOLD = """
import sys
from pathlib import Path
from megatron_async.files.lock import FileLock, Holder
lock = FileLock.acquire(Path(sys.argv[1]), Holder.this_process("a test"))
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """Start a process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_file_lock_names_its_holder_when_another_process_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = hold(path)
    try:
        with pytest.raises(LockHeld) as refusal:
            FileLock.acquire(path, Holder.this_process("another"))
        holder = refusal.value.holder
        assert holder is not None and holder.is_here and holder.is_running_here()
        assert (holder.pid, holder.what) == (process.pid, "a test")
        assert str(refusal.value).startswith(f"process {process.pid} on host {os.uname().nodename}")
    finally:
        process.kill()
        process.wait(30)
    assert not holder.is_running_here()
    FileLock.acquire(path, Holder.this_process("another")).close()


def test_file_lock_is_released_when_a_forked_child_has_its_descriptor(tmp_path: Path) -> None:
    """Between fork and exec, a child has a copy of every descriptor, for long on a busy machine."""
    path = tmp_path / "lock"
    lock = FileLock.acquire(path, Holder.this_process("a test"))
    other = lock.share()
    go_on, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(go_on, 1)  # The read returns when the parent closes its end.
        os._exit(0)
    try:
        lock.close()
        with pytest.raises(LockHeld):
            FileLock.acquire(path, Holder.this_process("too early"))
        other.close()
        FileLock.acquire(path, Holder.this_process("the next")).close()
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_file_lock_is_held_in_its_own_process_until_all_shares_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock.acquire(path, Holder.this_process("first"))
    with pytest.raises(LockHeld, match="first"):
        FileLock.acquire(path, Holder.this_process("second"))
    other = first.share()
    first.close()
    first.close()
    with pytest.raises(LockHeld, match="first"):
        FileLock.acquire(path, Holder.this_process("second"))
    other.close()
    FileLock.acquire(path, Holder.this_process("second")).close()


def test_holder_is_not_running_here_when_start_time_or_host_differs() -> None:
    me = Holder.this_process("me")
    assert me.is_running_here()
    assert not Holder(me.pid, me.host, me.started - 1.0, "me").is_running_here()
    assert not Holder(me.pid, "elsewhere", me.started, "me").is_running_here()
