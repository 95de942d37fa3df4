"""Turns errors of full, read-only or inaccessible disks into clear messages, and writes safely.

Invariants
- The message names the path, the reason that the system gives, and the remedy.
- A `JsonLinesFile` appends lines completely or not at all, even if the disk becomes full during the
  write. If a killed process left a last line without a newline, opening the file again adds the
  newline if the line is complete JSON, else removes the line.
- No error is hidden: an error that does not concern the disk is raised unchanged.
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
_FAILING: Final = "check its file system, which is full, over its quota or failing"
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
# These error numbers always concern a disk. The other numbers in `_REMEDIES` count as disk errors
# only if the error names a file.
_SURELY_DISK: Final = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_RUST_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_TAIL_BYTES: Final = 1 << 16
_BUFFER_BYTES: Final = 1 << 16


class CannotWrite(ComponentFailure):
    """Raised when a file cannot be written; the message has the path, the reason and the remedy."""


def reason(error: BaseException) -> str:
    """Return why a file cannot be written, and the remedy if known, as the end of a message."""
    if isinstance(error, OSError):
        remedy = _REMEDIES.get(error.errno or 0)
        cause = error.strerror or str(error)
    else:
        remedy = _SQLITE_REMEDIES.get(getattr(error, "sqlite_errorcode", 0) & 0xFF)
        cause = str(error)
    return cause if remedy is None else f"{cause}; {remedy}"


def reason_and_file(error: BaseException) -> str:
    """Return the file that the error names, if any, followed by the result of `reason`."""
    file = getattr(error, "filename", None)
    return reason(error) if file is None else f"{file}: {reason(error)}"


@contextlib.contextmanager
def writing(path: Path | str | None, what: str = "") -> Iterator[None]:
    """Convert every system error raised in the block to a CannotWrite that names `path`.

    Args:
        path: The file that the block writes.
        what: Purpose of the file, if its name does not show it.
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
    """Return the OSError behind an exception, or None if it is not a system error.

    Libraries written in Rust, such as safetensors, do not raise OSError. Their messages contain the
    system's error number, from which an OSError is made.
    """
    if isinstance(error, OSError):
        return error
    number = _RUST_ERROR.search(str(error))
    return None if number is None else OSError(int(number[1]), os.strerror(int(number[1])))


def disk_failure(error: BaseException) -> CannotWrite | None:
    """Return a CannotWrite that explains a disk-related OSError; None for any other error.

    Code that writes to a known path uses `writing`. This function is for errors of other code, such
    as the code of libraries, which would reach the user without an explanation.
    """
    if not isinstance(error, OSError) or error.errno not in _REMEDIES:
        return None
    if error.filename is None and error.errno not in _SURELY_DISK:
        return None
    return CannotWrite(f"{error.filename or 'a file'} cannot be used: {reason(error)}")


@contextlib.contextmanager
def translating_disk_errors() -> Iterator[None]:
    """Convert disk-related OSErrors raised in this block to CannotWrite."""
    try:
        yield
    except OSError as error:
        failure = disk_failure(error)
        if failure is None:
            raise
        raise failure from error


def check_free_space(directory: Path, size: int) -> None:
    """Raise a CannotWrite unless `directory` has free space for files of `size` bytes in total.

    This writes a file of that size, and removes it.
    """
    trial = directory / f".room-{os.getpid()}"
    with writing(directory):
        try:
            with trial.open("wb") as file:
                file.write(bytes(size))
        finally:
            with contextlib.suppress(OSError):  # An error of the write above must not be hidden.
                trial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `path`, which replaces `path` when the block succeeds.

    If the block fails, the temporary file is removed and `path` stays unchanged.

    Args:
        path: The file to replace or create.
        durable: Whether to force the new file to disk before it replaces the old one.

    Raises:
        OSError: If the file cannot be replaced.
    """
    # The name is random rather than made from the process ID, because on a shared file system a
    # process of another node may have the same ID.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        if durable:
            replace_durably(temporary, path)
        else:
            temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):  # An error of the write above must not be hidden.
            temporary.unlink(missing_ok=True)


def check_file_names() -> None:
    """Raise a UserError if this Python cannot encode every file name.

    It can if the file-system encoding is UTF-8.
    """
    if (encoding := sys.getfilesystemencoding()) != "utf-8":
        raise UserError(
            f"Python's file-system encoding is {encoding}, which cannot encode every path. Set "
            "LC_ALL=C.UTF-8, or PYTHONUTF8=1."
        )


def remove_unfinished(directory: Path) -> None:
    """Remove the temporary files that killed processes left in `directory` (see `replacing`).

    Call this only while no other process writes to the directory.
    """
    for file in directory.glob(".*.????????.tmp"):
        file.unlink(missing_ok=True)


@contextlib.contextmanager
def with_default_mode(path: Path) -> Iterator[None]:
    """Give the file that the block writes at `path` the access mode of an ordinary new file.

    That is the mode which the umask determines. This is meant for libraries that choose another
    mode, such as safetensors.

    Raises:
        OSError: If the file or its mode cannot be written.
    """
    # Create the file to see which mode a new file gets. `os.umask` would return the umask, but also
    # change it for all threads of the process.
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    yield
    path.chmod(mode)


def replace_durably(temporary: Path, target: Path) -> None:
    """Rename `temporary` to `target` so that a power loss leaves the old or the new file intact.

    Raises:
        OSError: If the file cannot be renamed or forced to disk.
    """
    force_to_disk(temporary)
    temporary.replace(target)
    force_to_disk(target.parent)


def force_to_disk(path: Path) -> None:
    """Wait until the content of a file, or the list of names in a directory, is on disk (fsync).

    Raises:
        OSError: If it cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def leads_to(path: Path, file: os.stat_result) -> bool:
    """Return whether `path` still refers to the open file whose `os.fstat` result is `file`.

    It does not if the file was removed or replaced. If that cannot be determined, return True.
    """
    try:
        return os.path.samestat(path.stat(), file)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        # The disk does not respond, so this cannot be determined. Later reads and writes of the
        # open file will raise the error.
        return True


class JsonLinesFile:
    """A file of JSON lines to which lines are only appended.

    Once a write has failed, every later write raises the same CannotWrite, but `close` does not. If
    the file is removed or replaced while it is open, the next flush opens or creates the file at
    its path, unless this object was made with `new`.

    Raises:
        CannotWrite: If the file cannot be opened, here or in `write`, `flush` and `close`.
    """

    def __init__(self, path: Path, *, new: bool = False) -> None:
        """Open the file, and repair its last line if an earlier process did not complete it.

        Args:
            path: The file; it is created if it does not exist.
            new: Whether the file must not exist yet.
        """
        self._path = path
        self._buffer = bytearray()
        self._failure: CannotWrite | None = None
        self._new = new
        self._file = self._opened()

    def _opened(self) -> int:
        """Open the file, repair its last line, and return the file descriptor."""
        with writing(self._path):
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | (os.O_EXCL if self._new else 0)
            file = os.open(self._path, flags, 0o666)
            try:
                _repair_last_line(file)
            except BaseException:
                os.close(file)
                raise
            return file

    def write(self, text: str) -> int:
        """Add `text`, which is whole lines, to a buffer that is flushed once it has 64 KiB.

        Returns:
            The number of characters in `text`.
        """
        if self._failure is not None:
            raise self._failure
        self._buffer += text.encode()
        if len(self._buffer) >= _BUFFER_BYTES:
            self.flush()
        return len(text)

    def flush(self) -> None:
        """Append all buffered lines to the file, or none of them if that fails."""
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
        """Flush the buffered lines, unless a write has failed before, and close the file."""
        if self._file < 0:
            return
        try:
            if self._failure is None:
                self.flush()
        finally:
            file, self._file = self._file, -1
            os.close(file)


def append_json_lines(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Append `rows` to a JSONL file as one line each; create the file if it does not exist.

    Raises:
        CannotWrite: If the file cannot be written.
    """
    with contextlib.closing(JsonLinesFile(path)) as file:
        for row in rows:
            file.write(json.dumps(row) + "\n")


def json_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the JSON object of each line in `data`; skip incomplete lines and other values."""
    for line in data.split(b"\n"):
        with contextlib.suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def whole_lines_end(path: Path) -> int:
    """Return the number of bytes of a file's complete lines; 0 if the file does not exist."""
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return 0
    try:
        return os.fstat(file).st_size - len(_after_last_newline(file))
    finally:
        os.close(file)


def _append(file: int, data: bytes) -> None:
    """Append `data` completely or not at all to a file that only this process writes."""
    start = os.lseek(file, 0, os.SEEK_END)
    try:
        while data:
            data = data[os.write(file, data) :]
    except OSError:
        os.ftruncate(file, start)
        raise


def _repair_last_line(file: int) -> None:
    """Repair a last line without a newline: add the newline if the line is JSON, else remove it."""
    rest = _after_last_newline(file)
    if not rest:
        return
    try:
        json.loads(rest)
        _append(file, b"\n")
    except ValueError:
        os.ftruncate(file, os.fstat(file).st_size - len(rest))


def _after_last_newline(file: int) -> bytes:
    """Return the bytes after the last newline of a file."""
    size = start = os.fstat(file).st_size
    tail = b""
    while start and b"\n" not in tail:
        start = max(0, start - _TAIL_BYTES)
        tail = os.pread(file, size - start, start)
    return tail[tail.rfind(b"\n") + 1 :]
