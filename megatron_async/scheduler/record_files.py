"""A run's record files, `events/<lineage>[.<lost>[.<segment>]].jsonl`, and how many of them stay.

`lost` counts how often the lineage's rollout manager had been lost before, `segment` the files of
one record; what is left out is 0.

Invariants
- No file is ever overwritten, and no name is used again after its file was removed.
- The files of a directory take at most `most_bytes` and one snapshot, over all lineages: beyond
  that the oldest go. Of the record that is being written, older segments than the last
  `keep_steps` steps need go too. The file that is being written stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from megatron_async.disk import LineFile, writing
from megatron_async.scheduler.events import EmitBatch

_SEGMENTS = 4
"""Segments in which the steps, or the bytes, that are kept are divided."""


class RecordKey(NamedTuple):
    """What the name of a record file says; keys sort in the order in which files were written."""

    lineage: int
    lost: int = 0
    segment: int = 0

    @property
    def name(self) -> str:
        """The name of the file."""
        parts = list(self)
        while len(parts) > 1 and not parts[-1]:
            parts.pop()
        return ".".join(map(str, parts)) + ".jsonl"


def record_key(path: Path) -> RecordKey | None:
    """The key of a record file; None for other files."""
    parts = path.name.removesuffix(".jsonl").split(".")
    if not all(part.isdecimal() and part.isascii() for part in parts) or len(parts) > 3:
        return None
    key = RecordKey(*map(int, parts))
    return key if key.name == path.name else None


def record_files(directory: Path) -> dict[RecordKey, Path]:
    """All record files of a directory, oldest first."""
    keyed = ((record_key(path), path) for path in directory.glob("*.jsonl"))
    return dict(sorted((key, path) for key, path in keyed if key is not None))


class RecordFiles:
    """The files of one record: where it goes on, and what goes for it."""

    def __init__(self, directory: Path, lineage: int, *, keep_steps: int, most_bytes: int) -> None:
        earlier = [key.lost for key in record_files(directory) if key.lineage == lineage]
        self._directory = directory
        self._key = RecordKey(lineage, max(earlier, default=-1) + 1, -1)
        self._steps_each = -(-keep_steps // _SEGMENTS)
        self._most_bytes = most_bytes
        self._steps = 0

    def open_next(self) -> LineFile:
        """The next file, empty; what need not be kept any more is removed. Raises CannotWrite."""
        self._steps = 0
        self._key = self._key._replace(segment=self._key.segment + 1)
        with writing(self._directory):
            self._directory.mkdir(exist_ok=True)
            stream = LineFile(self._directory / self._key.name, new=True)
            self._prune()
        return stream

    def full(self, actions: Sequence[object], size: int) -> bool:
        """Whether the next file is due after these actions, with `size` bytes of events written."""
        if any(isinstance(action, EmitBatch) for action in actions):
            self._steps += 1
            if self._steps >= self._steps_each:
                return True
        return size * _SEGMENTS >= self._most_bytes

    def _prune(self) -> None:
        files = record_files(self._directory)
        del files[self._key]
        room = self._most_bytes - self._most_bytes // _SEGMENTS
        for key, path in reversed(files.items()):
            same = key[:2] == self._key[:2]
            with suppress(FileNotFoundError):
                room -= path.stat().st_size
                if room < 0 or (same and key.segment < self._key.segment - _SEGMENTS):
                    path.unlink()
