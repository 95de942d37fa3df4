"""Caches the index of a large file of problems for the next process that reads the same file.

The index has the row number, key and size of each problem of the file. Both the check before a
start and the process of the rollout manager need it, and building it takes 15 s for a million rows.

Invariants
- A cached index is used only for files of the same sizes and modification times, read under the
  same settings by the same code. Otherwise, or if the cache cannot be read or written, the file is
  read again.
- Correctness does not depend on the cache alone: a row whose problem has another key than the index
  says is refused (`files.py`).
"""

import os
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TypeAlias

from megatron_async.config.data import FileConfig

MIN_CACHED_ROWS = 100_000
"""Number of rows from which on a file's index is cached."""
_COLUMNS = 3

Index: TypeAlias = "tuple[array[int], array[int], array[int]]"
"""The row number, key and size of each problem of a file, as three arrays of equal length."""


def cached_index(file: FileConfig, template: str, make: Callable[[], Index]) -> Index:
    """Return the index of `file` from the cache if it is up to date, else from `make`.

    A result of `make` is written to the cache, where it replaces the index of an earlier state of
    the file under the same settings. If it cannot be written, the next process calls `make` again.

    Args:
        file: Path and settings of the file.
        template: Text of everything else that the index depends on, such as the prompt template.
        make: Builds the index by reading the file.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    settings = f"{Path(file.path).absolute()}\n{file.model_dump_json()}\n{template}"
    place = Path(home) / "megatron_async" / f"index-{_digest(settings).hex()}"
    states = [f"{p}:{s.st_size}:{s.st_mtime_ns}" for p, s in _stats(Path(file.path))]
    state = _digest("\n".join([_code(), *states]))
    with suppress(OSError):
        data = place.read_bytes()
        values = array("Q", data[len(state) : len(data) // 8 * 8])
        if data.startswith(state) and len(data) % (8 * _COLUMNS) == 16:
            rows = len(values) // _COLUMNS
            return values[:rows], values[rows : 2 * rows], values[2 * rows :]
    index = make()
    with suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = place.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(state + b"".join(column.tobytes() for column in index))
        temporary.replace(place)
    return index


def _stats(path: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the file `path`, or each file below the folder `path`, with its `os.stat` result."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return ((file, file.stat()) for file in files)


@lru_cache
def _code() -> str:
    """Return a hash of this package's source, so that other code does not use the cached index."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return _digest("".join(file.read_text() for file in files)).hex()


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
