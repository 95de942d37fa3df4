"""A value that shows whether plain `pickle` has read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Hostile:
    """Unpickling it makes the directory `marker`."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self._marker,)
