"""Writes and reads the export file: one JSON line for each trajectory that compaction removed.

Compaction removes trajectories from the store's database once no restorable checkpoint needs them.

Invariants
- A line is read only if the removal of its trajectory from the database is committed. Lines beyond
  the committed length of the file may be left by a crash; their trajectories are still in the
  database. So the database and the export file together have every trajectory exactly once,
  provided that both are read within `StoreReader.at_one_moment`, since a compaction may be running.
- Lines are on disk before the removal of their trajectories is committed.
- A line that compaction cannot have written raises a UserError that names the file and the line.
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
    """Append one line for each trajectory of `groups` to the export file, and force it to disk.

    Args:
        connection: The database, from which the trajectories are read.
        groups: Ids of the groups.
        consumed_by: For every trajectory that was trained, its batch. A trajectory without an entry
            is written as dropped.
        file: The export file; its folder is made if it is missing.
        committed: Committed length of the file in bytes. Lines beyond it, which an earlier append
            left when it failed, are cut off first.

    Returns:
        The new length of the file in bytes.

    Raises:
        CannotWrite: The disk refuses the lines.
        DamagedStore: A row of the database is damaged or missing.
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
    """Cut the export file at `path` to `length` bytes, its committed length, if it is longer.

    The trajectories of the lines beyond that length are still in the database. A missing file is
    not an error.

    Raises:
        OSError: The file cannot be truncated.
    """
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
    # Python's JSON module, unlike orjson, can write every number and every unpaired surrogate that
    # a policy's response may contain.
    names = [field.name for field in fields(Turn) if field.name != "state"]
    return orjson.Fragment(json.dumps([{n: getattr(turn, n) for n in names} for turn in turns]))


def _values(array: np.ndarray) -> Any:
    # Standard JSON cannot express infinity or NaN; the dialect of Python's JSON module can.
    return array if np.isfinite(array).all() else orjson.Fragment(json.dumps(array.tolist()))


# ---------------------------------------------------------------- reading


def export_notice(reader: StoreReader) -> str:
    """Return a notice of how many trajectories compaction has removed, and where they are now.

    They are in the export file, or nowhere with `store.export: none`. The notice is empty if none
    were removed.
    """
    exported = reader.exported()
    count = exported.batched + sum(exported.dropped.values())
    if not count:
        return ""
    if not exported.bytes:
        return f"{count} more were removed by compaction (store.export is none)"
    return f"{count} more are in {reader.export_file} (--exported lists them too)"


def summaries(reader: StoreReader) -> list[TrajectorySummary]:
    """Return a summary of every trajectory in the export file, in ascending order of ids.

    Raises:
        UserError: The export file or a line of it cannot be read.
    """
    found = [_summary(t) for t in _trajectories(reader.export_file, reader.exported())]
    return sorted(found, key=lambda summary: summary.trajectory_id)


def find(reader: StoreReader, trajectory_id: int) -> Trajectory:
    """Return the trajectory with this id from the database or else from the export file.

    Raises:
        UserError: Neither has the trajectory, or one of them cannot be read.
    """
    if not reader.contains(trajectory_id):
        for found in _trajectories(reader.export_file, reader.exported(), only=trajectory_id):
            return found
    # If the database does not have the trajectory either, this raises an error that says why.
    return reader.trajectory(trajectory_id)


def _trajectories(file: Path, exported: Exported, only: int | None = None) -> Iterator[Trajectory]:
    """Yield the trajectories in the export file `file`, in the order of its lines.

    Lines beyond the committed length, `exported.bytes`, are not read. If `only` is given, just the
    trajectory with that id is parsed and yielded.
    """
    if not exported.bytes:
        return
    beginning = f'{{"trajectory_id":{only},'.encode()
    end = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                end += len(line)
                if end > exported.bytes:
                    return
                if only is None or line.startswith(beginning):
                    yield _parsed(line, f"{file}, line {number}")
    except OSError as error:
        raise UserError(f"failed to read the export {file}: {error.strerror}") from error


def _parsed(line: bytes, where: str) -> Trajectory:
    try:
        return _trajectory(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where}, is not an exported trajectory: {error!r}") from error


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
