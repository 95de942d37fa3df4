"""Writing to a disk that may be full, read-only or not this user's: a sentence, not a traceback.

Invariants
- The sentence names the path, the reason that the system gives, and the remedy.
- A line of a `JsonLinesFile` is in the file whole or not at all, also when the disk fills up within
  it and when its writer is killed; a line that an earlier process left torn does not swallow the
  next.
- No error is hidden: what is no matter of the disk is raised as it is.
"""

import contextlib
import errno
import json
import os
import re
import secrets
import sqlite3
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from megatron_async.errors import ComponentFailure, UserError

_NO_ROOM: Final = "free space on its file system, or raise the quota"
_NO_RIGHT: Final = "give this user the right to write there"
_FAILING: Final = "look at its file system, which is full, over its quota or failing"
_READ_ONLY: Final = "mount its file system writable"
_REMEDIES: Final = {
    errno.ENOSPC: _NO_ROOM,
    errno.EDQUOT: _NO_ROOM,
    errno.EROFS: _READ_ONLY,
    errno.EACCES: _NO_RIGHT,
    errno.EPERM: _NO_RIGHT,
    errno.EIO: _FAILING,
    errno.ESTALE: _FAILING,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
}
_SQLITE_REMEDIES: Final = {
    sqlite3.SQLITE_FULL: _NO_ROOM,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: f"{_NO_RIGHT}, and space",
    sqlite3.SQLITE_PERM: _NO_RIGHT,
    sqlite3.SQLITE_IOERR: _FAILING,
}
# These are a disk's, whatever was done; the others only where the error names a file.
_SURELY_DISK: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_RUST_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_TAIL_BYTES: Final = 1 << 16
_BUFFER_BYTES: Final = 1 << 16


class CannotWrite(ComponentFailure):
    """A file cannot be written; names it, the reason and the remedy."""


def reason(error: BaseException) -> str:
    """Return why a file cannot be written and what to do, as the end of a sentence."""
    if isinstance(error, OSError):
        remedy = _REMEDIES.get(error.errno or 0)
        cause = error.strerror or str(error)
    else:
        remedy = _SQLITE_REMEDIES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        cause = str(error)
    return cause if remedy is None else f"{cause}; {remedy}"


def reason_and_file(error: BaseException) -> str:
    """`reason`, after the file that the error names, if any."""
    file = getattr(error, "filename", None)
    return reason(error) if file is None else f"{file}: {reason(error)}"


@contextlib.contextmanager
def writing(path: Path | str | None, what: str = "") -> Iterator[None]:
    """Raise as CannotWrite what the system refuses inside the block.

    `what` names the file's purpose where its name does not.
    """
    try:
        yield
    except Exception as error:
        found = _system_error(error)
        if found is None:
            raise
        name = f"{what} {path}" if what else str(path)
        raise CannotWrite(f"{name} cannot be written: {reason(found)}") from error


def _system_error(error: Exception) -> OSError | None:
    """Return the system's error; libraries in Rust (safetensors) pass it on as text."""
    if isinstance(error, OSError):
        return error
    number = _RUST_ERROR.search(str(error))
    return None if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def disk_failure(error: BaseException) -> CannotWrite | None:
    """The sentence of an error that got out of a write without one; None for any other error.

    Every write whose path is known is inside `writing`; this is for what others write for us.
    """
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    if error.filename is None and error.errno not in _SURELY_DISK:
        return None
    return CannotWrite(f"{error.filename or 'a file'} cannot be used: {reason(error)}")


@contextlib.contextmanager
def translating_disk_errors() -> Iterator[None]:
    """Raise the sentence of `disk_failure` for an OSError of a process's work that has one."""
    try:
        yield
    except OSError as error:
        failure = disk_failure(error)
        if failure is None:
            raise
        raise failure from error


def check_room(directory: Path, size: int) -> None:
    """Check that files of `size` bytes can be made in `directory`. Raises CannotWrite."""
    trial = directory / f".room-{os.getpid()}"
    with writing(directory):
        try:
            with trial.open("wb") as file:
                file.write(bytes(size))
        finally:
            with contextlib.suppress(OSError):  # the error of the write is the one that matters
                trial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a name beside `path`; the file that the block writes there takes its place at the end.

    `durable`: it is on disk before. Nothing is left of a block that fails. Raises OSError.
    """
    # Not the process id: on a shared file system another node's process may have the same.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        if durable:
            replace_durably(temporary, path)
        else:
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # the error of the write is the one that matters
            temporary.unlink(missing_ok=True)


def check_file_names() -> None:
    """Check that this Python can encode every file name.

    Raises:
        UserError: The file-system encoding is not UTF-8.
    """
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise UserError(
            f"this Python names files in {encoding}, which not every path can be written in: set "
            "LC_ALL=C.UTF-8, or PYTHONUTF8=1"
        )


def remove_unfinished(directory: Path) -> None:
    """Remove temporary files of `replacing` from `directory`, left by processes that were killed.

    Call this only while no other process writes to the directory.
    """
    for left in directory.glob(".*.????????.tmp"):
        left.unlink(missing_ok=True)


@contextlib.contextmanager
def with_default_mode(path: Path) -> Iterator[None]:
    """Give the file that the block writes at `path` the mode that umask gives any new file.

    Meant for libraries that choose a mode themselves, as safetensors does. Raises OSError.
    """
    # Not os.umask, which reads the umask only by changing it for all threads of the process.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def replace_durably(temporary: Path, target: Path) -> None:
    """`temporary` gets the name `target`; a power loss leaves it there whole, or what was before.

    Raises OSError.
    """
    force_to_disk(temporary)
    temporary.replace(target)
    force_to_disk(target.parent)


def force_to_disk(path: Path) -> None:
    """A file's content, or a directory's names. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leads_to(path: Path, file: os.stat_result) -> bool:
    """Return whether `file` is what lies at `path` now, and not known to be removed or replaced."""
    try:
        return os.path.samestat(path.stat(), file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # a disk that does not answer: reads and writes of the open file decide
        return True


class JsonLinesFile:
    """A file of JSON lines that is only appended to. Raises CannotWrite, then and at every later
    write; `close` does not raise what was raised before.

    A file that somebody removes meanwhile is made again, unless it was to be a new one.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Mends the last line of a file that is there. With `new` there must be none."""
        self._path = path
        self._buffer = bytearray()
        self._failure: CannotWrite | None = None
        self._new = new
        self._file = self._opened()

    def _opened(self) -> int:
        with writing(self._path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_EXCL if self._new else 0)
            file = os.open(self._path, flags, 0o666)
            try:
                _mend_last_line(file)
            except BaseException:
                os.close(file)
                raise
            return file

    def write(self, text: str) -> int:
        """Lines, for the next `flush`, or for now when enough have gathered."""
        if self._failure is not None:
            raise self._failure
        self._buffer += text.encode()
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Hand what was written to the operating system, all of it or nothing."""
        if self._failure is not None:
            raise self._failure
        try:
            with writing(self._path):
                if not self._new and not leads_to(self._path, os.fstat(self._file)):
                    removed, self._file = self._file, self._opened()
                    os.close(removed)
                _append(self._file, bytes(self._buffer))
        except CannotWrite as failure:
            self._failure = failure
            raise
        finally:
            self._buffer.clear()

    def close(self) -> None:
        """Flush and close."""
        if self._file < 0:
            return
        try:
            if self._failure is None:
                self.flush()
        finally:
            file, self._file = self._file, -1
            os.close(file)


def append_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append `rows` to a JSONL file, made where it is missing. Raises CannotWrite."""
    with contextlib.closing(JsonLinesFile(path)) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The objects in the lines of `data`; a line that is none, as a torn one, is left out."""
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def whole_lines_end(path: Path) -> int:
    """The length of a file without what follows its last newline; 0 where there is no file."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(file).st_size - len(_after_last_newline(file))
    finally:
        os.close(file)


def _append(file: int, data: bytes) -> None:
    """All of `data` or nothing, at the end of a file that only this process writes."""
    start = os.lseek(file, 0, os.SEEK_END)
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        os.ftruncate(file, start)
        raise


def _mend_last_line(file: int) -> None:
    """A last line without newline is ended where it is whole, and cut off where it is torn."""
    rest = _after_last_newline(file)
    if not rest:
        return
    try:
        json.loads(rest)
        _append(file, b"\n")
    except ValueError:
        os.ftruncate(file, os.fstat(file).st_size - len(rest))


def _after_last_newline(file: int) -> bytes:
    size = start = os.fstat(file).st_size
    tail = b""
    while start and b"\n" not in tail:
        start = max(0, start - _TAIL_BYTES)
        tail = os.pread(file, size - start, start)
    return tail[tail.rfind(b"\n") + 1 :]
