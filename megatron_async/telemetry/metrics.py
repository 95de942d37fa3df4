"""`metrics.jsonl` and TensorBoard: one line and one set of scalars for each step.

Invariants
- A line is written whole and flushed before the next step begins.
- After a resume from step n, lines of later steps of the abandoned line stay; every line carries
  its lineage, and readers keep the newest line of a step (`read_metrics`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt


class MetricsWriter:
    """Writes for one process (trainer rank 0, or the sft command)."""

    def __init__(self, metrics_file: Path, tensorboard_dir: Path | None, *, lineage: int) -> None:
        self._file = metrics_file.open("a", encoding="utf-8")
        self._lineage = lineage
        self._tensorboard: Any = None
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(tensorboard_dir), flush_secs=10)

    def write(self, step: int, metrics: Mapping[str, float], *, kind: str = "train") -> None:
        """Append one step."""
        line = {
            "kind": kind,
            "step": step,
            "lineage": self._lineage,
            "time": round(time.time(), 3),
            **{name: float(value) for name, value in metrics.items()},
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            for name, value in metrics.items():
                self._tensorboard.add_scalar(name, float(value), step)

    def warn(self, step: int, name: str, message: str) -> None:
        """A named warning, for the progress display and for whoever looks later."""
        line = {
            "kind": "warning",
            "step": step,
            "lineage": self._lineage,
            "name": name,
            "message": message,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._tensorboard is not None:
            self._tensorboard.add_text(f"warning/{name}", message, step)

    def histogram(self, step: int, name: str, values: npt.ArrayLike) -> None:
        """A TensorBoard histogram."""
        if self._tensorboard is not None:
            self._tensorboard.add_histogram(name, values, step)

    def close(self) -> None:
        """Flush and close both."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path, *, kind: str = "train") -> list[dict[str, float]]:
    """Lines of one kind along the surviving line, by step. A torn last line is left out."""
    newest: dict[int, dict[str, float]] = {}
    if not path.exists():
        return []
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if line.get("kind") != kind:
            continue
        known = newest.get(line["step"])
        if known is None or line["lineage"] >= known["lineage"]:
            newest[line["step"]] = line
    last = max((line["lineage"] for line in newest.values()), default=0)
    surviving = [s for s, line in newest.items() if line["lineage"] == last]
    end = max(surviving, default=-1)
    return [newest[step] for step in sorted(newest) if step <= end]
