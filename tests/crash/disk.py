"""Controls the disk and the wall clock of processes under test.

The processes preload the library `edges.c`, which reads its commands from a shared page.
"""

from __future__ import annotations

import mmap
import os
import struct
import subprocess
from pathlib import Path

_DISK = {
    "": 0,
    "disk is slow": 1,
    "disk is full": 2,
    "disk is read-only": 3,
    "disk hangs at fsync": 4,
}
_PAGE = struct.Struct("<iiq")
_SLOW_MILLISECONDS = 40
PAGE_VARIABLE = "FAULT_PAGE"
ROOT_VARIABLE = "FAULT_ROOT"


class Edges:
    """State of the disk and the wall clock in all processes started with `environment`."""

    def __init__(self, page: Path) -> None:
        self._path = page
        if not page.exists():
            page.write_bytes(bytes(_PAGE.size))
        with page.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE.size)
        self._disk, self._ahead_ns = 0, 0

    @classmethod
    def of_this_process(cls) -> Edges | None:
        """Return the state that controls this process; None if the library is not preloaded."""
        name = os.environ.get(PAGE_VARIABLE, "")
        return cls(Path(name)) if name and "edges.so" in os.environ.get("LD_PRELOAD", "") else None

    def environment(self, library: Path, root: Path) -> dict[str, str]:
        """Return the environment of a process that preloads the library.

        Args:
            library: The compiled library.
            root: Directory whose files are on the controlled disk.
        """
        return {
            **os.environ,
            "LD_PRELOAD": str(library),
            PAGE_VARIABLE: str(self._path),
            ROOT_VARIABLE: str(root),
        }

    def disk(self, kind: str = "") -> None:
        """Let the disk fail by the fault `kind`; "" lets the disk work again."""
        self._disk = _DISK[kind]
        self._write()

    def jump(self, seconds: float) -> None:
        """Set the wall clock ahead by `seconds`, or back if `seconds` is negative."""
        self._ahead_ns += round(seconds * 1e9)
        self._write()

    def heal(self) -> None:
        """Let the disk work again; the clock is not changed."""
        self.disk()

    def _write(self) -> None:
        self._page[:] = _PAGE.pack(self._disk, _SLOW_MILLISECONDS, self._ahead_ns)


def build_library(folder: Path) -> Path:
    """Compile `edges.c` into `folder`; return the path of the library.

    Raises:
        FileNotFoundError: No C compiler is installed.
        subprocess.CalledProcessError: The compiler fails.
    """
    library = folder / "edges.so"
    source = Path(__file__).with_name("edges.c")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library
