"""The index of a large file of problems, kept for the next process that reads the same file.

The check at the start and the rollout manager need the same index, and of a million rows it takes
a quarter of a minute.

Invariants
- It is used for files of the same sizes and times of change only, read under the same settings by
  the same code; whatever is not so, or cannot be read or written, is read again.
- Nothing rests on it alone: a row whose problem has another key is refused (`files.py`).
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

from megatron_async.config.data import FileConfig

LEAST_ROWS = 100_000
_COLUMNS = 3

Index: TypeAlias = "tuple[array[int], array[int], array[int]]"


class KeptIndex:
    """Place of the index of one file under one template; it has room for one state of the file."""

    def __init__(self, file: FileConfig, template: str) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
        settings = f"{Path(file.path).absolute()}\n{file.model_dump_json()}\n{template}"
        self._place = Path(home) / "megatron_async" / f"index-{_digest(settings).hex()}"
        states = [f"{p}:{s.st_size}:{s.st_mtime_ns}" for p, s in _stats(Path(file.path))]
        self._state = _digest("\n".join([_code(), *states]))

    def read(self) -> Index | None:
        """The index, if it is that of the file as it is now."""
        with suppress(OSError):
            data = self._place.read_bytes()
            values = array("Q", data[len(self._state) : len(data) // 8 * 8])
            if data.startswith(self._state) and len(data) % (8 * _COLUMNS) == 16:
                rows = len(values) // _COLUMNS
                return values[:rows], values[rows : 2 * rows], values[2 * rows :]
        return None

    def write(self, index: Index) -> None:
        """Keep it; where there is no place for it, the next process reads the file."""
        with suppress(OSError):
            self._place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = self._place.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(self._state + b"".join(column.tobytes() for column in index))
            temporary.replace(self._place)


def _stats(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return ((file, file.stat()) for file in files)


@lru_cache
def _code() -> str:
    """Digest of the code that makes an index."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return _digest("".join(file.read_text() for file in files)).hex()


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
