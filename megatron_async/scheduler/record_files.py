"""Names of a run's record files, `events/<lineage>.jsonl`.

Invariants
- A record is never overwritten: a line whose rollout manager was lost on the way has one more file
  for each time, `events/<lineage>.<n>.jsonl`.
"""

from __future__ import annotations

from pathlib import Path


def record_key(path: Path) -> tuple[int, int] | None:
    """(lineage, how often its manager had been lost) of a record file; None for other files."""
    parts = path.name.removesuffix(".jsonl").split(".")
    if not all(part.isdigit() for part in parts) or len(parts) > 2:
        return None
    return int(parts[0]), int(parts[1]) if len(parts) == 2 else 0


def unused_record(directory: Path, lineage: int) -> Path:
    """Where the next record of this line goes."""
    path, lost = directory / f"{lineage}.jsonl", 0
    while path.exists():
        lost += 1
        path = directory / f"{lineage}.{lost}.jsonl"
    return path
