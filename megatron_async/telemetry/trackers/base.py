"""The interface of a tracker: override what yours has a place for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

Row = Mapping[str, Any]


@dataclass(frozen=True)
class TrackedRun:
    """The run that a tracker follows. `lineage` is above 0 when it was restored.

    `stage`: `sft` where the run directory is that of RL too, else empty.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    lineage: int = 0
    stage: str = ""

    @property
    def label(self) -> str:
        """The name, with the stage if there is one."""
        return f"{self.name}-{self.stage}" if self.stage else self.name


class Tracker:
    """A place that a run reports to, made with the `arguments` of its setting.

    `start` comes first and `finish` last. All calls come one after another from one thread of their
    own, so they may take their time: what they raise, and what they are too slow for, is counted
    and never stops the run. A restored run starts its trackers again and repeats steps.
    """

    def start(self, run: TrackedRun) -> None:
        """Open what the others write to."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Scalars of a step; `eval/...` are those of an evaluation."""

    def histogram(self, step: int, name: str, values: npt.NDArray[Any]) -> None:
        """Numbers of which the distribution matters."""

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Responses of an evaluation: question, response, reward and more."""

    def text(self, step: int, name: str, text: str) -> None:
        """A warning by its name, or the totals at the end (`report`)."""

    def checkpoint(self, step: int, path: Path) -> None:
        """A checkpoint that can be restored is on disk."""

    def finish(self) -> None:
        """Write what is left."""
