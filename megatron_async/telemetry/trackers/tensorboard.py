"""Provides the TensorBoard tracker, which writes event files in the run directory."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from megatron_async.telemetry.trackers.base import Row, TrackedRun, Tracker

_FLUSH_SECONDS = 10
_MAX_ROWS = 16


class TensorBoardTracker(Tracker):
    """Writes scalars, histograms and texts as TensorBoard events to `folder` in the run
    directory."""

    def __init__(self, folder: str = "tensorboard") -> None:
        self._folder = folder
        self._writer: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open a new event file. After a resume, TensorBoard then hides the repeated steps in
        earlier files."""
        from torch.utils.tensorboard import SummaryWriter

        directory = str(run.directory / self._folder / run.stage)
        self._writer = SummaryWriter(directory, flush_secs=_FLUSH_SECONDS, purge_step=run.step)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of a step to the event file."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def histogram(self, step: int, name: str, values: npt.NDArray[Any]) -> None:
        """Write a histogram to the event file."""
        self._writer.add_histogram(name, values, step)

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Write the first responses of an evaluation as preformatted text to the event file."""
        texts = (json.dumps(row, indent=1, ensure_ascii=False) for row in rows[:_MAX_ROWS])
        self.text(step, f"samples/{name}", "\n\n".join(f"```\n{text}\n```" for text in texts))

    def text(self, step: int, name: str, text: str) -> None:
        """Write a warning or the report as text to the event file."""
        self._writer.add_text(name, text, step)

    def checkpoint(self, step: int, path: Path) -> None:
        """Write the path of a checkpoint as text to the event file."""
        self.text(step, "checkpoint", str(path))

    def finish(self) -> None:
        """Close the event file."""
        self._writer.close()
