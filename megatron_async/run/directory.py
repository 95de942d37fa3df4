"""The run directory: `runs/<name>/{config.yaml, metrics.jsonl, tensorboard/, checkpoints/, ...}`.

Invariants
- A run directory is complete (its config.yaml is there) or it is not a run.
- A new run never writes into the directory of another one; `--resume` is the way to go on.
- What one process has to tell the others beyond Ray and collectives goes through small files here,
  written atomically.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_async.config import RunConfig, dump, load_config
from megatron_async.errors import UserError


class Outcome(Enum):
    """How the trainers of a run have ended without a failure."""

    COMPLETE = "complete"
    STOPPED = "stopped"


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def store_file(self) -> Path:
        return self.path / "trajectories.sqlite"

    @property
    def events(self) -> Path:
        """Recorded scheduler events, one file for each line of the run."""
        return self.path / "events"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def hf_export(self) -> Path:
        return self.path / "hf"

    @property
    def failure_file(self) -> Path:
        return self.path / "failure.json"

    @classmethod
    def create(cls, config: RunConfig) -> RunDirectory:
        """A new run. Raises UserError when the name is taken or the place cannot be written."""
        directory = cls((Path(config.root) / config.name).absolute())
        if directory.config_file.exists():
            raise UserError(
                f"run directory {directory.path} exists already: choose another name "
                f"(got name {config.name!r}) or go on with it by --resume {directory.path}"
            )
        try:
            directory.logs.mkdir(parents=True, exist_ok=True)
            write_atomically(directory.config_file, dump(config))
        except OSError as error:
            raise UserError(
                f"run directory {directory.path} cannot be made: {error.strerror}"
            ) from error
        return directory

    @classmethod
    def open(cls, path: Path | str, overrides: list[str]) -> tuple[RunDirectory, RunConfig]:
        """An existing run and its settings with `overrides` on top. Raises UserError."""
        directory = cls(Path(path).absolute())
        if not directory.config_file.exists():
            raise UserError(f"--resume {path}: there is no run (no config.yaml) in that directory")
        config = load_config(directory.config_file, overrides)
        directory.logs.mkdir(exist_ok=True)
        text = dump(config)
        if text != directory.config_file.read_text():  # Every rank opens; hardly one changes it.
            write_atomically(directory.config_file, text)
        return directory, config

    def save_config(self, config: RunConfig) -> None:
        """What the run goes on with, for its other processes and for a resume."""
        write_atomically(self.config_file, dump(config))

    def next_lineage(self) -> int:
        """A number that no line of this run has had: 0 for the first, then 1, 2, ... Durable."""
        counter = self.path / "lineage"
        lineage = int(counter.read_text()) + 1 if counter.exists() else 0
        write_atomically(counter, str(lineage))
        return lineage

    def report_failure(self, sentence: str, exit_code: int) -> None:
        """Leave one sentence for whoever started this process; the first one stays."""
        if not self.failure_file.exists():
            write_atomically(
                self.failure_file, json.dumps({"sentence": sentence, "exit_code": exit_code})
            )

    def take_failure(self) -> dict[str, Any] | None:
        """The sentence that a process left, if any; it is removed."""
        if not self.failure_file.exists():
            return None
        found: dict[str, Any] = json.loads(self.failure_file.read_text())
        self.failure_file.unlink()
        return found

    @property
    def outcome_file(self) -> Path:
        return self.path / "outcome"

    def report_outcome(self, outcome: Outcome) -> None:
        """Tell whoever holds the rollout side that the trainers are done."""
        write_atomically(self.outcome_file, outcome.value)

    def outcome(self) -> Outcome | None:
        """None while the trainers run, or when they have failed."""
        return Outcome(self.outcome_file.read_text()) if self.outcome_file.exists() else None

    def forget_outcome(self) -> None:
        """Before trainers start anew."""
        self.outcome_file.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """All of `text` or nothing, also for a reader at the same time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
