"""Lines of the export file, in which compaction puts what it takes out: written, and read again.

Invariants
- Only lines whose removal from the database is committed are read; what a crash left beyond them is
  in the database still. So with the store's own rows every trajectory is there once, if both are
  read at one moment (`StoreReader.at_one_moment`): compaction may go on.
- Lines are on disk before their removal is committed.
- A line that is not what compaction writes raises UserError naming the file and the line.
"""

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_async.errors import UserError
from megatron_async.files.disk import writing
from megatron_async.store.documents import Exported
from megatron_async.store.reader import (
    NO_PROMPT,
    StoreReader,
    TrajectorySummary,
    read_group,
    read_rows,
    read_tokens,
    trajectory_of,
)
from megatron_async.store.schema import BatchRow, TrajectoryRow
from megatron_async.trajectory.columns import find_mismatch
from megatron_async.trajectory.types import (
    FinishReason,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    Turn,
)


def write_lines(
    connection: sqlite3.Connection,
    groups: Iterable[int],
    consumed_by: Mapping[int, BatchRow],
    file: Path,
    committed: int,
) -> int:
    """Append the lines of `groups` and force them to disk; returns the file's length.

    What an append that failed before has left beyond `committed` bytes is cut off first. Raises
    CannotWrite, DamagedStore.
    """
    lines = (line for group_id in groups for line in _lines(connection, group_id, consumed_by))
    with writing(file):
        cut_uncommitted(file, committed)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as out:
            out.writelines(line + b"\n" for line in lines)
            out.flush()
            os.fsync(out.fileno())
            return out.tell()


def cut_uncommitted(path: Path, length: int) -> None:
    """Remove lines whose removal from the database was never committed. Raises OSError."""
    if path.exists() and path.stat().st_size > length:
        os.truncate(path, length)


def _lines(
    connection: sqlite3.Connection, group_id: int, consumed_by: Mapping[int, BatchRow]
) -> Iterator[bytes]:
    group = read_group(connection, group_id)
    ids = group.trajectory_ids
    for row in read_rows(
        connection, TrajectoryRow, "trajectory_id BETWEEN ? AND ?", ids[0], ids[-1]
    ):
        tokens = read_tokens(connection, row)
        batch = consumed_by.get(row.trajectory_id)
        line = {
            "trajectory_id": row.trajectory_id,
            "group_id": row.group_id,
            "task": group.task,
            "prompt": {
                "token_ids": np.frombuffer(group.token_ids, dtype="<i4"),
                "payload": orjson.Fragment(group.payload),
                "priority": group.priority,
            },
            "segments": [_segment_line(segment) for segment in tokens.segments],
            "complete": tokens.complete,
            "finish_reason": row.finish_reason,
            "reward": row.reward,
            "reward_detail": orjson.Fragment(row.reward_detail),
            "batch": None if batch is None else {"lineage": batch.lineage, "step": batch.step},
            "drop_reason": row.drop_reason if batch is None else None,
        }
        if tokens.turns:
            line["turns"] = _turn_lines(tokens.turns)
        yield orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY)


def _segment_line(segment: Segment) -> dict[str, Any]:
    further = [(field := c.dtype.descr[0], _values(c[field[0]])) for c in segment.columns]
    return {
        "version": str(segment.version),
        "engine_id": segment.engine_id,
        "from_environment": segment.from_environment,
        "token_ids": segment.token_ids,
        "logprobs": _values(segment.logprobs),
        **({"columns": further} if further else {}),
    }


def _turn_lines(turns: Sequence[Turn]) -> orjson.Fragment:
    # Python's JSON: a policy may have written any number, and any half of a surrogate pair.
    names = [field.name for field in fields(Turn) if field.name != "state"]
    return orjson.Fragment(json.dumps([{n: getattr(turn, n) for n in names} for turn in turns]))


def _values(array: np.ndarray) -> Any:
    # JSON has no infinity, Python's dialect of it has.
    return array if np.isfinite(array).all() else orjson.Fragment(json.dumps(array.tolist()))


# ---------------------------------------------------------------- reading


def export_notice(reader: StoreReader) -> str:
    """Return how many trajectories have left the database, and for where; empty: none has."""
    exported = reader.exported()
    count = exported.batched + sum(exported.dropped.values())
    if not count:
        return ""
    if not exported.bytes:
        return f"{count} more were removed by compaction (store.export is none)"
    return f"{count} more are in {reader.export_file} (--exported lists them too)"


def summaries(reader: StoreReader) -> list[TrajectorySummary]:
    """The exported trajectories by id. Raises UserError when the file cannot be read."""
    found = [_summary(t) for t in _trajectories(reader.export_file, reader.exported())]
    return sorted(found, key=lambda summary: summary.trajectory_id)


def find(reader: StoreReader, trajectory_id: int) -> Trajectory:
    """Find it in the store or in its export. Raises UserError when it is in neither."""
    if not reader.holds(trajectory_id):
        for found in _trajectories(reader.export_file, reader.exported(), only=trajectory_id):
            return found
    return reader.trajectory(trajectory_id)  # which has the reason why there is none


def _trajectories(file: Path, exported: Exported, only: int | None = None) -> Iterator[Trajectory]:
    """Read the file in order, not beyond its committed length; `only` one trajectory."""
    if not exported.bytes:
        return
    beginning = f'{{"trajectory_id":{only},'.encode()
    place = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                place += len(line)
                if place > exported.bytes:
                    return
                if only is None or line.startswith(beginning):
                    yield _parsed(line, f"{file}, line {number}")
    except OSError as error:
        raise UserError(f"export {file} cannot be read: {error.strerror}") from error


def _parsed(line: bytes, where: str) -> Trajectory:
    try:
        return _trajectory(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is not an exported trajectory: {error!r}") from error


def _trajectory(row: dict[str, Any]) -> Trajectory:
    batch, prompt = row["batch"], row["prompt"]
    stored = TrajectoryRow(
        int(row["trajectory_id"]),
        int(row["group_id"]),
        state="dropped",
        reward_detail=json.dumps(row["reward_detail"]),
        **{name: row[name] for name in ("finish_reason", "reward", "drop_reason")},
    )
    token_ids = np.asarray(prompt["token_ids"], dtype=np.int32)
    problem = Prompt(token_ids, row["task"], prompt["payload"], prompt["priority"])
    segments = tuple(map(_segment, row["segments"]))
    turns = tuple(map(_turn, row.get("turns", ())))
    step = None if batch is None else int(batch["step"])
    return trajectory_of(stored, problem, segments, turns, step)


def _turn(row: dict[str, Any]) -> Turn:
    return Turn(**{**row, "end": None if row["end"] is None else FinishReason(row["end"])})


def _segment(row: dict[str, Any]) -> Segment:
    segment = Segment(
        np.asarray(row["token_ids"], dtype=np.int32),
        np.asarray(row["logprobs"], dtype=np.float32),
        PolicyVersion.parse(row["version"]),
        row["engine_id"],
        row["from_environment"],
        tuple(_column(*column) for column in row.get("columns", ())),
    )
    if (found := find_mismatch(segment.arrays)) is not None:
        raise ValueError(found)
    return segment


def _column(field: list[Any], values: list[Any]) -> np.ndarray:
    return np.array([(value,) for value in values], [tuple(field)])


def _summary(trajectory: Trajectory) -> TrajectorySummary:
    versions = tuple(s.version for s in trajectory.segments if not s.from_environment)
    bare = vars(replace(trajectory, prompt=NO_PROMPT, segments=(), turns=()))
    return TrajectorySummary(
        **bare,
        tokens=trajectory.response_length,
        versions=versions,
        turn_count=len(trajectory.turns),
    )
