"""Recorded response lengths: from a run directory, or from a file of an export or another program.

A file is a JSON list, one number a line, or JSONL whose objects hold `response_length`,
`response_ids`, or `segments` (the lines of `export/trajectories.jsonl`: tokens that the environment
wrote are not counted). Where an object has `finish_reason`, `length` is a response that was cut,
and null is one that never ended (it was dropped before).

Invariants
- Lines are read one by one and only their lengths are kept: an export may be larger than the
  memory. (A JSON list is read whole.)
- Of a run's own export, what is behind the last committed removal is left out, as a run that goes
  on, or one that was killed, may have a torn line there.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async.config.files import parse_json
from megatron_async.errors import UserError, shown
from megatron_async.run_directory import RunDirectory
from megatron_async.store import export
from megatron_async.store.place import has_store
from megatron_async.store.reader import StoreReader
from megatron_async.trajectory.types import FinishReason

_LONGEST = 1e15  # tokens; beyond it floats skip whole numbers
Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recorded:
    """Lengths in tokens, whether the response would have been longer, and whether it ended, [n].

    What was cut at the length limit has ended; what was dropped before has not. Both would have
    been longer.
    """

    lengths: Array
    censored: Flags
    ended: Flags

    def cut_at(self, limit: float) -> Recorded:
        """The same when every response of `limit` tokens or more was cut there."""
        reached = self.lengths >= limit
        return Recorded(
            np.minimum(self.lengths, limit), self.censored | reached, self.ended | reached
        )


def read_lengths(path: Path) -> Array:
    """Read lengths of responses that ended. Raises UserError naming the file and the entry."""
    sample = read_recorded(path, "simulate.lengths.path")
    if not sample.ended.any():
        raise UserError(f"simulate.lengths.path {path} holds no response that ended")
    return sample.lengths[sample.ended]


def read_recorded(path: Path, setting: str) -> Recorded:
    """All lengths of a file. Raises UserError naming the setting, the file and the entry.

    An unfinished response without any token is left out.
    """
    if path.is_dir():
        return _of_run(path, setting)
    lengths, censored, ended = array("d"), bytearray(), bytearray()
    for number, entry in enumerate(_entries(path, setting), start=1):
        (tokens, shown), ending = _length(entry), _ending(entry)
        unstarted = tokens == 0 and ending is None
        if tokens is None or not (tokens >= 1 or unstarted):
            raise UserError(f"{setting} {path}: entry {number} is not a length: {shown}")
        if not unstarted:
            lengths.append(tokens)
            censored.append(ending in (None, "length"))
            ended.append(ending is not None)
    if not lengths:
        raise UserError(f"{setting} {path} holds no length")
    return Recorded(
        np.array(lengths), np.array(censored).astype(bool), np.array(ended).astype(bool)
    )


def _of_run(path: Path, setting: str) -> Recorded:
    """Read the responses in a run's store and in its export. UserError when there are none."""
    directory, _ = RunDirectory.find(path, [], setting)
    with closing(StoreReader(directory.store_file)) as reader, reader.at_one_moment():
        found = [s for s in (*reader.summaries(), *export.summaries(reader)) if s.tokens]
    if not found:
        raise UserError(f"{setting} {path}: the run has no response yet")
    ended = np.array([s.finish_reason is not None for s in found])
    cut = np.array([s.finish_reason is FinishReason.LENGTH for s in found])
    return Recorded(np.array([float(s.tokens) for s in found]), cut | ~ended, ended)


def _entries(path: Path, setting: str) -> Iterator[Any]:
    committed, place, seen = _committed_bytes(path), 0, False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                place += len(line)
                if place > committed:
                    return
                if not line.strip():
                    continue
                is_list, seen = not seen and line.lstrip().startswith(b"["), True
                where = "" if is_list else f", line {number},"
                found = _parsed(line + file.read() if is_list else line, f"{setting} {path}{where}")
                if is_list:
                    yield from found
                    return
                yield found
    except OSError as error:
        run = path.absolute().parent.parent
        hint = ""
        if RunDirectory(run).config_file.exists():
            hint = f"; the run has exported nothing yet, name its directory instead: {run}"
        raise UserError(f"{setting} {path} cannot be read: {error.strerror}{hint}") from error


def _parsed(text: bytes, where: str) -> Any:
    try:
        return parse_json(text.decode(), where)
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not UTF-8 text: {error}") from error


def _committed_bytes(path: Path) -> float:
    """Return how far `path` may be read: no limit, unless it is the export of a run."""
    store = RunDirectory(path.absolute().parent.parent).store_file
    if not has_store(store):
        return math.inf
    with closing(StoreReader(store)) as reader:
        return reader.exported().bytes if reader.export_file == path.absolute() else math.inf


def _length(entry: Any) -> tuple[float | None, object]:
    """The tokens that were generated (None: this is no length), and what a refusal shows."""
    found = entry
    if isinstance(entry, dict):
        known = [(name, count) for name, count in _FORMS.items() if name in entry]
        if not known:
            return None, f"it has none of {', '.join(_FORMS)}"
        name, count = known[0]
        found = count(entry[name])
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None, found
    return (float(found) if abs(found) < _LONGEST else None), shown(found)


def _ending(entry: Any) -> str | None:
    return entry.get("finish_reason", "stop") if isinstance(entry, dict) else "stop"


def _itself(value: Any) -> Any:
    return value


def _of_ids(value: Any) -> Any:
    return len(value) if isinstance(value, list) else value


def _of_segments(value: Any) -> Any:
    try:
        return sum(len(s["token_ids"]) for s in value if not s["from_environment"])
    except (TypeError, KeyError):
        return f"segments {str(value)[:80]}"


_FORMS: dict[str, Callable[[Any], Any]] = {
    "response_length": _itself,
    "response_ids": _of_ids,
    "segments": _of_segments,
}
