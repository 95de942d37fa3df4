"""Provides the log of a child process, of limited size however much the process prints.

Invariants
- The newest output is in two files, PATH and PATH.1, of at most `LOG_BYTES` each. Older output is
  dropped.
- The child never waits for a disk: output that cannot be written is dropped too.
"""

import os
import threading
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Final

LOG_BYTES: Final = 1 << 20
"""Maximum size of each of the two log files."""
_TAIL_BYTES: Final = 1 << 16
_PIECE_BYTES: Final = 1 << 16


class BoundedLog:
    """Copies a child process's output from a pipe into a log of limited size.

    Pass `sink`, the write end of the pipe, to the child as its standard output and error.

    Raises:
        OSError: If the log file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = path.open("ab", buffering=0)
        self._tail = b""
        self._source, self.sink = os.pipe()
        self._thread = threading.Thread(target=self._follow, name=path.name, daemon=True)

    def start(self) -> None:
        """Start a thread that copies the child's output to the log; close this process's `sink`.

        Call it after the child was started. The thread ends when every writer has closed the pipe.
        """
        os.close(self.sink)
        self._thread.start()

    def discard(self) -> None:
        """Close the log file and the pipe. Call this instead of `start` if there is no child."""
        if self._file is not None:
            self._file.close()
        for end in (self._source, self.sink):
            os.close(end)

    def tail(self, seconds: float) -> str:
        """Wait up to `seconds` for the end of the child's output; return its last 64 KiB."""
        self._thread.join(seconds)
        return self._tail.decode(errors="replace")

    def _follow(self) -> None:
        """Copy the child's output to the log until every writer has closed the pipe."""
        with open(self._source, "rb", buffering=0) as source:  # noqa: PTH123 - a descriptor
            while piece := source.read(_PIECE_BYTES):
                self._tail = (self._tail + piece)[-_TAIL_BYTES:]
                with suppress(OSError):
                    self._write(piece)
        if self._file is not None:
            self._file.close()

    def _write(self, piece: bytes) -> None:
        """Append output to the log file; if the file would become too large, start a new one.

        The full file is renamed to PATH.1 and replaces the earlier one there.
        """
        file, self._file = self._file, None
        if file is not None and file.tell() + len(piece) > LOG_BYTES:
            file.close()
            file = None
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
        self._file = file or self._path.open("ab", buffering=0)
        self._file.write(piece)
