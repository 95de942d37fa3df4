"""Exclusive lock of one process on a file that names its holder.

Invariants
- The lock (`flock`) ends with its process, however that ends; the file stays. Between hosts it
  reaches as far as the file system carries it (NFS 4, GPFS, Lustre mounted with `flock`).
- It ends when the last that holds it is closed, also while a child that is being started, and has
  not yet executed its program, has a copy of the descriptor.
- The holder named in the file is for people, and means nothing while the lock is free.
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
    """A process, when it started (seconds since 1970), and what it does; `session` of a launch."""

    pid: int
    host: str
    started: float
    what: str
    session: str = ""

    @classmethod
    def this_process(cls, what: str, session: str = "") -> "Holder":
        process = psutil.Process()
        return cls(process.pid, socket.gethostname(), process.create_time(), what, session)

    @property
    def is_here(self) -> bool:
        """Return whether the process is (or was) on this host."""
        return self.host == socket.gethostname()

    def lives_here(self) -> bool:
        """Return whether the process runs on this host, and is not another one with its number."""
        try:
            return self.is_here and psutil.Process(self.pid).create_time() == self.started
        except psutil.Error:
            return False

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on host {self.host} ({self.what}, started {since})"


class LockHeld(Exception):
    """Another process, or this one, holds the lock; `holder` as far as the file names it."""

    def __init__(self, holder: Holder | None) -> None:
        super().__init__(str(holder or "an unknown process"))
        self.holder = holder


class LocksUnsupported(Exception):
    """The file system offers no locks; holds the system's error."""


class FileLock:
    """A lock that is held until this, and whatever `share` has made of it, is closed."""

    def __init__(self, file: int, open_files: set[int]) -> None:
        """Use `take`. `open_files`: descriptors of all that hold the same lock."""
        self._file, self._open_files = file, open_files
        open_files.add(file)

    @classmethod
    def take(cls, path: Path, holder: Holder) -> "FileLock":
        """Lock the file for `holder`. Raises LockHeld, LocksUnsupported, or CannotWrite."""
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
        """The file stays locked until this is closed too."""
        return FileLock(os.dup(self._file), self._open_files)

    def close(self) -> None:
        """Release the lock; a second call does nothing."""
        if self._file >= 0:
            file, self._file = self._file, -1
            self._open_files.discard(file)
            if not self._open_files:
                fcntl.flock(file, fcntl.LOCK_UN)
            os.close(file)


def check_lock(path: Path) -> None:
    """Raise LockHeld while a process holds the lock; nothing is written, and it is not kept."""
    if not path.exists():
        return
    with writing(path):
        file = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        holder = read_holder(path)
        if error.errno in _HELD or (holder is not None and holder.lives_here()):
            raise LockHeld(holder) from error
    finally:
        os.close(file)


def read_holder(path: Path) -> Holder | None:
    """The holder named in a lock's file; None where there is none."""
    try:
        return Holder(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_holder(path: Path, holder: Holder) -> None:
    """Write the holder into the file. Raises OSError."""
    path.write_text(json.dumps(asdict(holder)))
