"""Writes and reads `metrics.jsonl`, which has a line for each step, and passes the same metrics to
trackers.

Invariants
- A line is written completely or not at all, and is flushed before the next step begins. A torn
  line of an earlier process is removed when the file is opened. A failing disk raises CannotWrite.
- Each start of the trainer has a lineage number, which every line contains. After a resume from a
  checkpoint of step n, the lines of later steps that were trained before the resume remain in the
  file. `read_metrics` uses only the line with the highest lineage number of each step, and no
  step after the last one of the newest lineage.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_async.files.disk import JsonLinesFile, json_lines, writing
from megatron_async.telemetry.trackers.base import CLOSE_SECONDS, BackgroundTracker

# Phases of a trainer's step with their metrics, in their order within the step.
TRAINER_PHASES = (
    ("waiting for a batch", "time/wait_for_batch"),
    ("training", "time/train"),
    ("weight verification", "time/verify"),
    ("weight update", "time/publish"),
    ("evaluation", "time/evaluate"),
    ("checkpoint", "time/checkpoint"),
)


class MetricsWriter:
    """Writes the metrics of one process (trainer rank 0 of a run or of fine-tuning) to
    metrics.jsonl, and passes them to the trackers.

    The object is a context manager, which closes the file and the trackers.
    """

    def __init__(
        self, metrics_file: Path, trackers: Sequence[BackgroundTracker] = (), *, lineage: int
    ) -> None:
        self._file = JsonLinesFile(metrics_file)
        self._path = metrics_file
        self._lineage = lineage
        self._trackers = trackers

    def write(
        self, step: int, metrics: Mapping[str, float], *, kind: str = "train", **labels: str
    ) -> None:
        """Append the metrics of a step to the file, and pass them to the trackers.

        Args:
            step: Number of the step.
            metrics: The metrics of the step by name.
            kind: Kind of the line, such as train or eval.
            **labels: Further texts of the line, which are not passed to the trackers.
        """
        for tracker in self._trackers:
            if (news := tracker.take_problem()) is not None:
                self.warn(step, f"tracker_{tracker.name}", news)
        lost = {
            "telemetry/tracker_calls_dropped": sum(t.dropped for t in self._trackers),
            "telemetry/tracker_calls_failed": sum(t.failed for t in self._trackers),
        }
        metrics = {**metrics, **{name: count for name, count in lost.items() if count}}
        values = {name: float(value) for name, value in metrics.items()}
        self._append(kind, step, {**values, **labels})
        self._track("metrics", step, values)

    def start(self, step: int, machine: str) -> None:
        """Append a line of kind `start`, with a description of the `machine` on which the run is
        started. `step` is the number of the first step."""
        self._append("start", step, {"machine": machine})

    def warn(self, step: int, name: str, message: str) -> None:
        """Append a named warning to the file, and pass it to the trackers."""
        self._append("warning", step, {"name": name, "message": message})
        self._track("text", step, f"warning/{name}", message)

    def _append(self, kind: str, step: int, content: Mapping[str, Any]) -> None:
        """Append a line to the file, with its kind, step, lineage and time."""
        line = {
            "kind": kind,
            "step": step,
            "lineage": self._lineage,
            "time": round(time.time(), 3),
            **content,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def histogram(self, step: int, name: str, values: npt.ArrayLike) -> None:
        """Pass `values` to the trackers, which show their distribution; they are not written to the
        file."""
        if self._trackers and np.size(values):
            self._track("histogram", step, name, np.array(values))

    def samples(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the responses of an evaluation set to a file in `evaluations/`, and pass them to
        the trackers.

        Args:
            step: Number of the policy version that was evaluated.
            name: Name of the set.
            rows: The responses.
        """
        folder = self._path.parent / "evaluations"
        with writing(file := folder / f"{name}-{step}.jsonl"):
            folder.mkdir(exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        self._track("samples", step, name, list(rows))

    def checkpoint(self, step: int, path: Path) -> None:
        """Tell the trackers that the checkpoint of `step` at `path` can be restored."""
        self._track("checkpoint", step, path)

    def report(self, step: int, text: str) -> None:
        """Pass the totals of the run to the trackers."""
        self._track("text", step, "report", text)

    def _track(self, method: str, *arguments: Any) -> None:
        """Queue a call of `method` for every tracker."""
        for tracker in self._trackers:
            tracker.call(method, *arguments)

    def close(self) -> None:
        """Close the trackers, which may take `CLOSE_SECONDS` in total, and then the file."""
        end = time.monotonic() + CLOSE_SECONDS
        try:
            for tracker in self._trackers:
                tracker.close(max(0.0, end - time.monotonic()))
        finally:
            self._file.close()

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def evaluated_sets(line: Mapping[str, float]) -> dict[str, str]:
    """Return the sets of an evaluation, in order, as a mapping from the set's name to the prefix of
    its metrics in `line`."""
    prefixes = [name.removesuffix("/accuracy") for name in line if name.endswith("/accuracy")]
    return {p.removeprefix("eval").removeprefix("/") or "held-out": p for p in prefixes}


def first_accuracy(line: Mapping[str, float]) -> float:
    """Return the accuracy of the first evaluation set in `line`. If the task holds out problems,
    this set has them."""
    return line[f"{next(iter(evaluated_sets(line).values()))}/accuracy"]


def sampling_name(temperature: float) -> str:
    """Return in words how an evaluation with this temperature samples responses, such as
    "greedy"."""
    return f"temperature {temperature:g}" if temperature else "greedy"


def read_all_metrics(path: Path, *, kind: str = "train") -> list[dict[str, Any]]:
    """Return all lines of one kind in a metrics file in the order of the file, including lines of
    steps that a resume has abandoned.

    Damaged lines are left out.
    """
    lines = json_lines(path.read_bytes()) if path.exists() else ()
    return [
        line
        for line in lines
        if line.get("kind") == kind
        and isinstance(line.get("step"), int)
        and isinstance(line.get("lineage"), int)
    ]


def read_metrics(path: Path, *, kind: str = "train") -> list[dict[str, float]]:
    """Return the lines of one kind in a metrics file, ordered by step, without lines of steps that
    a resume has abandoned.

    Damaged lines are left out.
    """
    newest: dict[int, dict[str, float]] = {}
    for line in read_all_metrics(path, kind=kind):
        earlier = newest.get(line["step"])
        if earlier is None or line["lineage"] >= earlier["lineage"]:
            newest[line["step"]] = line
    last = max((line["lineage"] for line in newest.values()), default=0)
    surviving = [s for s, line in newest.items() if line["lineage"] == last]
    end = max(surviving, default=-1)
    return [newest[step] for step in sorted(newest) if step <= end]
