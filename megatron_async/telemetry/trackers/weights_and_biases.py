"""Weights & Biases, online or offline (`WANDB_MODE=offline`, or the argument `mode`)."""

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
    """A W&B run for a run directory, restored runs included; more arguments go to `wandb.init`.

    Steps are a metric of their own, since W&B refuses a step that a restored run repeats.
    """

    def __init__(self, project: str = "megatron_async", **arguments: Any) -> None:
        self._arguments = {"project": project, **arguments}
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Open a run, or the one whose id is in the run directory again."""
        known = run.id_file("wandb")
        if not known.exists():
            with replacing(known) as temporary:
                temporary.write_text(secrets.token_hex(8))
        own = {
            "name": run.label,
            "id": known.read_text(),
            "dir": str(run.directory),
            "resume": "allow",
        }
        self._run = wandb.init(config=dict(run.config), **{**own, **self._arguments})
        self._run.define_metric(_STEP)
        self._run.define_metric("*", step_metric=_STEP)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log scalars."""
        self._run.log({_STEP: step, **values})

    def histogram(self, step: int, name: str, values: npt.NDArray[Any]) -> None:
        """Log a histogram."""
        self._run.log({_STEP: step, name: wandb.Histogram(values.tolist())})

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Log a table."""
        columns: list[str | int] = list(rows[0]) if rows else []
        data = [[str(row.get(str(column))) for column in columns] for row in rows]
        self._run.log({_STEP: step, f"samples/{name}": wandb.Table(columns=columns, data=data)})

    def text(self, step: int, name: str, text: str) -> None:
        """Keep the newest text of a name in the summary."""
        self._run.summary[name] = text

    def checkpoint(self, step: int, path: Path) -> None:
        """Keep the newest path in the summary."""
        self._run.summary["checkpoint"] = str(path)

    def finish(self) -> None:
        """End the run."""
        self._run.finish()
