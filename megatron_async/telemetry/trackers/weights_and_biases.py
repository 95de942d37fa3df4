"""Provides the Weights & Biases tracker, online or offline (`WANDB_MODE=offline` or argument
`mode`)."""

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import wandb

from megatron_async.files.disk import replacing
from megatron_async.telemetry.trackers.base import Row, TrackedRun, Tracker

_STEP = "step"


class WandbTracker(Tracker):
    """Reports a run to W&B. A run directory is one W&B run, which a resumed run continues.

    Additional arguments are passed to `wandb.init`. Step numbers are reported as a separate metric,
    because W&B refuses steps that a resumed run repeats.
    """

    def __init__(self, project: str = "megatron_async", **arguments: Any) -> None:
        self._arguments = {"project": project, **arguments}
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Create a W&B run, or reopen the one whose id is in the run directory."""
        id_file = run.id_file("wandb")
        if not id_file.exists():
            with replacing(id_file) as temporary:
                temporary.write_text(secrets.token_hex(8))
        defaults = {
            "name": run.label,
            "id": id_file.read_text(),
            "dir": str(run.directory),
            "resume": "allow",
        }
        self._run = wandb.init(config=dict(run.config), **{**defaults, **self._arguments})
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the scalars of a step to W&B."""
        self._run.log({_STEP: step, **values})

    def histogram(self, step: int, name: str, values: npt.NDArray[Any]) -> None:
        """Log a histogram to W&B."""
        self._run.log({_STEP: step, name: wandb.Histogram(values.tolist())})

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log the responses of an evaluation as a table to W&B."""
        columns: list[str | int] = list(rows[0]) if rows else []
        data = [[str(row.get(str(column))) for column in columns] for row in rows]
        self._run.log({_STEP: step, f"samples/{name}": wandb.Table(columns=columns, data=data)})

    def text(self, step: int, name: str, text: str) -> None:
        """Store a text in the summary of the W&B run, which keeps only the newest text of each
        name."""
        self._run.summary[name] = text

    def checkpoint(self, step: int, path: Path) -> None:
        """Store the path of the newest checkpoint in the summary of the W&B run."""
        self._run.summary["checkpoint"] = str(path)

    def finish(self) -> None:
        """End the W&B run."""
        self._run.finish()
