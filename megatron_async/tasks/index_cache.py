"""The index of a large file of problems, kept for the next process that reads the same file.

The check at the start and the rollout manager need the same index, and of a million rows it takes
a quarter of a minute.

Invariants
- It is used for files of the same sizes and times of change only, read under the same settings by
  the same code; whatever is not so, or cannot be read or written, is read again.
- Nothing rests on it alone: a row whose problem has another key is refused (`files.py`).
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

LEAST_ROWS = 100_000
_COLUMNS = 3

Index: TypeAlias = "tuple[array[int], array[int], array[int]]"


def kept(file: FileConfig, template: str, make: Callable[[], Index]) -> Index:
    """The index of `file` as it is now: the kept one, else what `make` returns, which is kept.

    There is room for one state of a file under one template. Where it cannot be kept, the next
    process makes it again.
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
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return ((file, file.stat()) for file in files)


@lru_cache
def _code() -> str:
    """Digest of the code that makes an index."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return _digest("".join(file.read_text() for file in files)).hex()


def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=16).digest()
