"""Reading what compaction has taken out of a store: the lines of its export file.

Invariants
- Only lines whose removal from the database is committed are read; what a crash left beyond them is
  in the database still. So with the store's own rows every trajectory is there once, if both are
  read at one moment (`StoreReader.at_one_moment`): compaction may go on.
- A line that is not what compaction writes raises UserError naming the file and the line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async.errors import UserError
from megatron_async.store.reader import Exported, StoreReader, TrajectorySummary
from megatron_async.trajectory.types import (
    DropReason,
    FinishReason,
    PolicyVersion,
    Prompt,
    Segment,
    Trajectory,
    TrajectoryState,
)


def missing_line(reader: StoreReader) -> str:
    """Says how many trajectories have left the database, and where they are; empty: none has."""
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
    """From the store or from its export. Raises UserError when it is in neither."""
    if reader.holds(trajectory_id):
        return reader.trajectory(trajectory_id)
    for trajectory in _trajectories(reader.export_file, reader.exported(), only=trajectory_id):
        return trajectory
    return reader.trajectory(trajectory_id)  # which says why there is none


def _trajectories(file: Path, exported: Exported, only: int | None = None) -> Iterator[Trajectory]:
    """In the order of the file, not beyond its committed length; `only` one of them."""
    if not exported.bytes:
        return
    # Exports of earlier versions have a space before the number.
    beginnings = tuple(f'{{"trajectory_id":{space}{only},'.encode() for space in ("", " "))
    place = 0
    try:
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                place += len(line)
                if place > exported.bytes:
                    return
                if only is None or line.startswith(beginnings):
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
    return Trajectory(
        trajectory_id=int(row["trajectory_id"]),
        group_id=int(row["group_id"]),
        prompt=Prompt(
            np.asarray(prompt["token_ids"], dtype=np.int32),
            row["task"],
            prompt["payload"],
            prompt.get("priority", 0),  # older exports have none
        ),
        state=TrajectoryState.DROPPED if batch is None else TrajectoryState.BATCHED,
        segments=tuple(_segment(segment) for segment in row["segments"]),
        finish_reason=None if row["finish_reason"] is None else FinishReason(row["finish_reason"]),
        reward=row["reward"],
        reward_detail=row["reward_detail"],
        batched_step=None if batch is None else int(batch["step"]),
        drop_reason=None if row["drop_reason"] is None else DropReason(row["drop_reason"]),
    )


def _segment(row: dict[str, Any]) -> Segment:
    return Segment(
        np.asarray(row["token_ids"], dtype=np.int32),
        np.asarray(row["logprobs"], dtype=np.float32),
        PolicyVersion.parse(row["version"]),
        row["engine_id"],
        row["from_environment"],
    )


def _summary(trajectory: Trajectory) -> TrajectorySummary:
    t = trajectory
    return TrajectorySummary(
        trajectory_id=t.trajectory_id,
        group_id=t.group_id,
        state=t.state,
        tokens=t.response_length,
        versions=tuple(s.version for s in t.segments if not s.from_environment),
        reward=t.reward,
        finish_reason=t.finish_reason,
        drop_reason=t.drop_reason,
        batched_step=t.batched_step,
    )
