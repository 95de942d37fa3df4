"""A lock names its holder and ends with it; a file system without locks is no holder."""

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
lock = FileLock.take(Path(sys.argv[1]), Holder.this_process("a test"))
print("held", flush=True)
sys.stdin.read()
"""


def hold(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_with_the_name_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process = hold(path)
    try:
        with pytest.raises(LockHeld) as refusal:
            FileLock.take(path, Holder.this_process("another"))
        holder = refusal.value.holder
        assert holder is not None and holder.is_here and holder.lives_here()
        assert (holder.pid, holder.what) == (process.pid, "a test")
        assert str(refusal.value).startswith(f"process {process.pid} on host {os.uname().nodename}")
    finally:
        process.kill()
        process.wait(30)
    assert not holder.lives_here()
    FileLock.take(path, Holder.this_process("another")).close()


def test_a_child_that_is_being_started_does_not_keep_the_lock(tmp_path: Path) -> None:
    """Between fork and exec it has a copy of every descriptor; a busy machine makes that long."""
    path = tmp_path / "lock"
    lock = FileLock.take(path, Holder.this_process("a test"))
    part = lock.share()
    go_on, end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        os.read(go_on, 1)  # until the parent closes its end
        os._exit(0)
    try:
        lock.close()
        with pytest.raises(LockHeld):
            FileLock.take(path, Holder.this_process("too early"))
        part.close()
        FileLock.take(path, Holder.this_process("the next")).close()
    finally:
        os.close(end)
        os.waitpid(child, 0)


def test_the_same_process_is_refused_too_until_it_has_given_the_lock_up(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock.take(path, Holder.this_process("first"))
    with pytest.raises(LockHeld, match="first"):
        FileLock.take(path, Holder.this_process("second"))
    part = first.share()
    first.close()
    first.close()
    with pytest.raises(LockHeld, match="first"):
        FileLock.take(path, Holder.this_process("second"))
    part.close()
    FileLock.take(path, Holder.this_process("second")).close()


def test_a_process_of_the_same_number_is_another_one() -> None:
    me = Holder.this_process("me")
    assert me.lives_here()
    assert not Holder(me.pid, me.host, me.started - 1.0, "me").lives_here()
    assert not Holder(me.pid, "elsewhere", me.started, "me").lives_here()
