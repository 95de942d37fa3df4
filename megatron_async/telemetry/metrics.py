"""`metrics.jsonl` and TensorBoard: one line and one set of scalars for each step.

Invariants
- A line is written whole or not at all, and flushed before the next step begins; one that an
  earlier process left torn is cut off when the file is opened. What cannot be written raises
  CannotWrite.
- After a resume from step n, lines of later steps of the abandoned line stay; every line carries
  its lineage, and readers keep the newest line of a step (`read_metrics`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy.typing as npt

from megatron_async.disk import LineFile, json_lines, writing


class MetricsWriter:
    """Writes for one process (trainer rank 0, or the sft command)."""

    def __init__(self, metrics_file: Path, tensorboard_dir: Path | None, *, lineage: int) -> None:
        self._file = LineFile(metrics_file)
        self._lineage = lineage
        self._tensorboard: Any = None
        self._board = tensorboard_dir
        if tensorboard_dir is not None:
            from torch.utils.tensorboard import SummaryWriter

            with writing(tensorboard_dir):
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
            with writing(self._board):
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
            with writing(self._board):
                self._tensorboard.add_text(f"warning/{name}", message, step)

    def histogram(self, step: int, name: str, values: npt.ArrayLike) -> None:
        """A TensorBoard histogram."""
        if self._tensorboard is not None:
            with writing(self._board):
                self._tensorboard.add_histogram(name, values, step)

    def close(self) -> None:
        """Flush and close both."""
        try:
            self._file.close()
        finally:
            if self._tensorboard is not None:
                with writing(self._board):
                    self._tensorboard.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path, *, kind: str = "train") -> list[dict[str, float]]:
    """Lines of one kind along the surviving line, by step. Torn lines are left out."""
    newest: dict[int, dict[str, float]] = {}
    if not path.exists():
        return []
    for line in json_lines(path.read_bytes()):
        if line.get("kind") != kind:
            continue
        known = newest.get(line["step"])
        if known is None or line["lineage"] >= known["lineage"]:
            newest[line["step"]] = line
    last = max((line["lineage"] for line in newest.values()), default=0)
    surviving = [s for s, line in newest.items() if line["lineage"] == last]
    end = max(surviving, default=-1)
    return [newest[step] for step in sorted(newest) if step <= end]
