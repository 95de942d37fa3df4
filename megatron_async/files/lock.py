"""Provides an exclusive lock on a file, which also names the process that holds the lock.

Invariants
- The kernel releases the lock (`flock`) when its process ends, even if the process is killed. The
  file is not removed. Between hosts the lock works only if the file system supports that, as NFS 4,
  GPFS and Lustre mounted with `flock` do.
- The lock is released when the last `FileLock` that shares it is closed. A child process that is
  just being started may still have a copy of the file descriptor; that copy does not keep the lock.
- The holder named in the file is information for people. It has no meaning while the lock is free.
"""

import errno
import fcntl
import json
import os
import socket
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil

from megatron_async.files.disk import writing

_HELD: Final = {errno.EAGAIN, errno.EACCES}


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, as written into the lock's file.

    Attributes:
        pid: Process ID.
        host: Name of the process's host.
        started: Start time of the process, in seconds since 1970.
        what: Activity of the process, for messages.
        session: Identity of the launch that the process belongs to; empty for none.
    """

    pid: int
    host: str
    started: float
    what: str
    session: str = ""

    @classmethod
    def this_process(cls, what: str, session: str = "") -> "Holder":
        """Return a holder that describes the current process."""
        process = psutil.Process()
        return cls(process.pid, socket.gethostname(), process.create_time(), what, session)

    @property
    def is_here(self) -> bool:
        """Whether the holder's process is, or was, on this host."""
        return self.host == socket.gethostname()

    def is_running_here(self) -> bool:
        """Return whether the holder's process is running on this host.

        A process with the same ID but another start time does not count.
        """
        try:
            return self.is_here and psutil.Process(self.pid).create_time() == self.started
        except psutil.Error:
            return False

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on host {self.host} ({self.what}, started {since})"


class LockHeld(Exception):
    """Raised when this process or another one already holds the lock.

    `holder` describes the process that holds it; None if the lock's file does not name one.
    """

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "an unknown process"))
        self.holder = holder


class LocksUnsupported(Exception):
    """Raised when the file system does not support locks; has the system's error message."""


class FileLock:
    """An exclusive file lock, held until this object and all objects that share it are closed."""

    def __init__(self, file: int, open_files: set[int]) -> None:
        """Wrap a locked file descriptor; call `acquire` instead to acquire a lock.

        Args:
            file: The descriptor.
            open_files: Descriptors of all `FileLock` objects that share the lock.
        """
        self._file, self._open_files = file, open_files
        open_files.add(file)

    @classmethod
    def acquire(cls, path: Path, holder: Holder) -> "FileLock":
        """Acquire the lock on the file `path` without waiting, and write `holder` into the file.

        Raises:
            LockHeld: If the lock is already held.
            LocksUnsupported: If the file system does not support locks.
            CannotWrite: If the file cannot be written.
        """
        with writing(path):
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _HELD:
                    raise LockHeld(read_holder(path)) from error
                raise LocksUnsupported(error.strerror) from error
            with writing(path):
                write_holder(path, holder)
        except BaseException:
            os.close(file)
            raise
        return cls(file, set())

    def share(self) -> "FileLock":
        """Return a second object for the same lock; the lock is held until both are closed."""
        return FileLock(os.dup(self._file), self._open_files)

    def close(self) -> None:
        """Close this object, and release the lock unless another object shares it.

        Further calls do nothing.
        """
        if self._file >= 0:
            file, self._file = self._file, -1
            self._open_files.discard(file)
            if not self._open_files:
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def check_lock(path: Path) -> None:
    """Raise LockHeld if a process holds the lock on `path`; write nothing.

    The check itself holds a shared lock for a moment, in which `FileLock.acquire` raises LockHeld.
    On a file system without locks, the lock counts as held if the process that its file names is
    running on this host.

    Raises:
        LockHeld: If a process holds the lock.
        CannotWrite: If the file exists and cannot be opened.
    """
    if not path.exists():
        return
    with writing(path):
        file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        holder = read_holder(path)
        if error.errno in _HELD or (holder is not None and holder.is_running_here()):
            raise LockHeld(holder) from error
    finally:
        os.close(file)


def read_holder(path: Path) -> Holder | None:
    """Return the holder named in a lock's file; None if the file does not name one."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_holder(path: Path, holder: Holder) -> None:
    """Write the holder of a lock into the lock's file.

    Raises:
        OSError: If the file cannot be written.
    """
    path.write_text(json.dumps(asdict(holder)))
