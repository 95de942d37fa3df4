"""Provides the MLflow tracker, which reports to a tracking server or a database file
(`sqlite:///FILE`)."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlflow import MlflowClient, get_tracking_uri
from mlflow.entities import Metric, Param

from megatron_async.errors import UserError
from megatron_async.files.disk import replacing
from megatron_async.telemetry.trackers.base import Row, TrackedRun, Tracker

_MAX_AT_ONCE = 500
_LONGEST_PARAMETER = 500
_REFUSED = re.compile(r"[^\w\-. /]")


class MlflowTracker(Tracker):
    """Reports a run to MLflow. A run directory is one MLflow run, which a resumed run continues."""

    def __init__(self, experiment: str = "megatron_async", tracking_uri: str | None = None) -> None:
        """Check that the installed package can use the tracking server.

        Args:
            experiment: Name of the MLflow experiment.
            tracking_uri: Address of the server or database; None means MLflow's default
                (`MLFLOW_TRACKING_URI`).

        Raises:
            UserError: If the installed package cannot use the address.
        """
        uri = tracking_uri or get_tracking_uri()
        server, folder = uri.startswith(("http", "databricks")), uri.startswith("file")
        if not (server or folder or find_spec("sqlalchemy")):
            raise UserError(
                f"tracking_uri is {uri!r}, which is not a server; it requires the package mlflow "
                "instead of mlflow-skinny"
            )
        self._experiment = experiment
        self._uri = tracking_uri
        self._client: Any = None
        self._run = ""

    def start(self, run: TrackedRun) -> None:
        """Create an MLflow run, or reopen the one whose id is in the run directory."""
        self._client = MlflowClient(tracking_uri=self._uri)
        id_file = run.id_file("mlflow")
        if id_file.exists():
            self._run = id_file.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )
        self._run = self._client.create_run(experiment, run_name=run.label).info.run_id
        with replacing(id_file) as temporary:
            temporary.write_text(self._run)
        flat = [Param(name, value[:_LONGEST_PARAMETER]) for name, value in _flat(run.config)]
        for begin in range(0, len(flat), 100):
            self._client.log_batch(self._run, params=flat[begin : begin + 100])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log the scalars of a step to MLflow."""
        now = int(1000 * time.time())
        found = [Metric(_name(key), value, now, step) for key, value in values.items()]
        for begin in range(0, len(found), _MAX_AT_ONCE):
            self._client.log_batch(self._run, metrics=found[begin : begin + _MAX_AT_ONCE])

    def samples(self, step: int, name: str, rows: Sequence[Row]) -> None:
        """Store the responses of an evaluation as a JSONL artifact in MLflow."""
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        self._client.log_text(self._run, lines, f"samples/{name}-{step}.jsonl")

    def text(self, step: int, name: str, text: str) -> None:
        """Store a warning or the report as a text artifact in MLflow."""
        self._client.log_text(self._run, text, f"{_name(name)}-{step}.txt")

    def checkpoint(self, step: int, path: Path) -> None:
        """Store the path of the newest checkpoint as a tag of the MLflow run."""
        self._client.set_tag(self._run, "checkpoint", str(path))

    def finish(self) -> None:
        """End the MLflow run."""
        self._client.set_terminated(self._run)


def _name(text: str) -> str:
    """Return `text` without the characters that MLflow refuses in names."""
    return _REFUSED.sub("_", text)


def _flat(config: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """Generate name and text of every setting in nested settings; levels are joined by dots."""
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{name}.")
        else:
            yield _name(f"{above}{name}"), str(value)
