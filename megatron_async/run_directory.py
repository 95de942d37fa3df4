"""The run directory: `runs/<name>/{config.yaml, metrics.jsonl, tensorboard/, checkpoints/, ...}`.

Invariants
- A run directory is complete (its config.yaml is there) or it is not a run.
- A new run never writes into the directory of another one; `--resume` is the way to go on.
- Settings are written only under the run's lock (`launcher/run_lock.py`); the run's processes read
  them.
- Messages between processes other than by places and collectives go through small files here,
  written atomically.
- A config.yaml that holds the engines' key is readable by its user only, from its first byte on.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from megatron_async.config import RunConfig, dump
from megatron_async.config.files import read_json_object, tokenizer_digest
from megatron_async.config.load import load_run_config
from megatron_async.errors import ComponentFailure, UserError
from megatron_async.files.disk import CannotWrite, check_room, replacing, writing

_FAILURE_BYTES: Final = 1 << 16


class RunOutcome(StrEnum):
    """End of a run's trainers without a failure."""

    COMPLETE = "complete"
    STOPPED = "stopped"


@dataclass(frozen=True)
class _PathOf:
    """A file or directory of a run, by its name."""

    name: str

    def __get__(self, run: "RunDirectory", owner: "type[RunDirectory]") -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path
    config_file = _PathOf("config.yaml")
    resume_file = _PathOf("config.resume.yaml")
    """Settings of a resume that has not begun; then they are those of `config_file`."""
    metrics_file = _PathOf("metrics.jsonl")
    tensorboard = _PathOf("tensorboard")
    checkpoints = _PathOf("checkpoints")
    store_file = _PathOf("trajectories.sqlite")
    events = _PathOf("events")
    """Recorded scheduler events, one file for each lineage."""
    logs = _PathOf("logs")
    ray_token_file = _PathOf("ray-token")
    """The key to a Ray of the run's own (`cluster: ray` on one machine), while that runs."""
    tokenizer_file = _PathOf("tokenizer.sha256")
    """Of the tokenizer and chat template that the run began with: its tokens are of no other."""
    data_file = _PathOf("data.json")
    """Identity of the data files that the run reads: `tasks.data_identity`."""
    id_file = _PathOf("id")
    """Random name of the run, for directories outside of the run directory."""
    lineage_file = _PathOf("lineage")
    lock_file = _PathOf("run.lock")
    """Held by the launch that the run belongs to."""
    hf_export = _PathOf("hf")
    failure_file = _PathOf("failure.json")
    failed_start_file = _PathOf("failed_start")
    """Left by a launch that failed before its first step; holds the sentence."""
    outcome_file = _PathOf("outcome")

    def never_began(self) -> bool:
        """Return whether a launch of it failed, and no launch has trained a step."""
        return self.failed_start_file.exists() and not self._has_trained()

    def check_free(self, *, resumable: bool = True) -> None:
        """Check that no run has this directory. Raises UserError."""
        if self.config_file.exists():
            remedy = f" or go on with it by --resume {self.path}" if resumable else ""
            raise UserError(
                f"run directory {self.path} exists already: choose another name "
                f"(got name {self.path.name!r}){remedy}"
            )

    def note_failed_start(self, sentence: str) -> None:
        """Called when a launch fails; keeps the sentence unless a step was trained."""
        if self.path.exists() and not self._has_trained():
            write_atomically(self.failed_start_file, sentence)

    def _has_trained(self) -> bool:
        if any(self.checkpoints.glob("*/manifest*.json")):
            return True
        lines = self.metrics_file.open(errors="replace") if self.metrics_file.exists() else ()
        return any('"kind": "train"' in line for line in lines)

    def set_aside(self) -> Path:
        """Rename it to NAME.failed-1, or the next free number; returns the new place."""
        number = 1
        while (place := self.path.with_name(f"{self.path.name}.failed-{number}")).exists():
            number += 1
        return self.path.rename(place)

    @classmethod
    def create(
        cls, config: RunConfig, data: Mapping[str, Any] | None = None, *, resumable: bool = True
    ) -> "RunDirectory":
        """A new run; `data`: the identity of its data files.

        Raises UserError when the name is taken or the place cannot be written.
        """
        directory = cls.of(config)
        directory.check_free(resumable=resumable)
        tokenizer = tokenizer_digest(config.model.path)
        try:
            with writing(directory.path, "run directory"):
                directory.logs.mkdir(parents=True, exist_ok=True)
            write_atomically(directory.tokenizer_file, tokenizer)
            directory._save_data(data)
            directory.save_config(config)
        except CannotWrite as error:
            raise UserError(str(error)) from error
        return directory

    @classmethod
    def of(cls, config: RunConfig) -> "RunDirectory":
        """Return the directory of a run with these settings."""
        return cls((Path(config.root) / config.name).absolute())

    @classmethod
    def find(
        cls, path: Path | str, overrides: list[str], named_by: str = "run directory"
    ) -> "tuple[RunDirectory, RunConfig]":
        """An existing run and its settings with `overrides` on top; writes nothing.

        Raises UserError naming what gave the path, e.g. an option.
        """
        directory = cls(Path(path).absolute())
        if not directory.config_file.exists():
            raise UserError(f"{named_by} {path}: there is no run (no config.yaml) in it")
        return directory, load_run_config(directory.config_file, overrides)

    @classmethod
    def launched(cls, path: Path | str) -> "tuple[RunDirectory, RunConfig]":
        """Find a run for the processes of a launch: what a resume has set counts."""
        directory, config = cls.find(path, [])
        file = directory.resume_file
        return directory, load_run_config(file) if file.exists() else config

    def save_config(self, config: RunConfig) -> None:
        """Write the settings for the run's other processes and for a resume."""
        write_atomically(self.config_file, dump(config), private=bool(config.engines.api_key))

    def prepare_resume(self, config: RunConfig) -> None:
        """Write the settings of a resume beside those of the run, until it has begun."""
        write_atomically(self.resume_file, dump(config), private=bool(config.engines.api_key))

    def begin(self, data: Mapping[str, Any] | None = None) -> None:
        """Called when trainers and engines hold the weights: the run is what the launch has set.

        `data`: the identity of the data files that the launch reads.
        """
        self.outcome_file.unlink(missing_ok=True)  # first: the settings may ask for more steps
        if self.resume_file.exists():
            self._save_data(data)
            self.resume_file.replace(self.config_file)

    def _save_data(self, data: Mapping[str, Any] | None) -> None:
        if data is not None:
            write_atomically(self.data_file, json.dumps(data, indent=1))

    def data_identity(self) -> dict[str, Any]:
        """Return the identity of the data that the run has read so far. Raises UserError."""
        file = self.data_file
        return read_json_object(file, f"{file}") if file.exists() else {}

    def weights_directory(self, parent: str) -> Path:
        """Return the directory in which only this run publishes weights.

        Args:
            parent: `weights.directory`; empty for a directory inside the run directory.
        """
        if not parent:
            return self.path / "weights"
        if not self.id_file.exists():
            write_atomically(self.id_file, f"{self.path.name}-{secrets.token_hex(8)}")
        # The inode number stays when the run directory is moved, and differs in a copy of it.
        return Path(parent) / f"{self.id_file.read_text()}-{self.id_file.stat().st_ino:x}"

    def tokenizer_digest(self) -> str:
        """Return that of the run's tokenizer; empty where an earlier version began the run."""
        return self.tokenizer_file.read_text() if self.tokenizer_file.exists() else ""

    def next_lineage(self) -> int:
        """A number that no lineage of this run has had: 0 for the first, then 1, 2, ... Durable."""
        lineage = self.lineages_so_far()
        write_atomically(self.lineage_file, f"{lineage}\n{lineage}\n", durable=True)
        return lineage

    def lineages_so_far(self) -> int:
        """Return how many lineages the run has had. Raises UserError when that is lost.

        A number that was used twice would make one token's policy version stand for two policies:
        the file holds it twice, so that a damaged digit is found.
        """
        counter = self.lineage_file
        text = counter.read_text(errors="replace") if counter.exists() else ""
        numbers = set(text.split())
        if len(numbers) == 1 and (number := numbers.pop()).isdecimal():
            return int(number) + 1
        if not counter.exists() and not self.store_file.exists() and not self._has_trained():
            return 0
        what = f"holds {text[:40]!r}, not one number" if counter.exists() else "is gone"
        raise UserError(
            f"{counter}, the number of the run's newest lineage, {what}: write it there again (the "
            f"last line of {self.metrics_file} has it as 'lineage'; a larger one is safe too)"
        )

    def report_failure(self, sentence: str, exit_code: int, attempt: str = "") -> None:
        """Write the message of a failure to `failure_file`, for the launcher.

        Only the first failure of an attempt is kept; it replaces that of an earlier attempt.

        Args:
            sentence: The message.
            exit_code: Exit code of the process.
            attempt: Identity of the attempt (`train_loop.attempt.current_attempt`).
        """
        known = json.loads(self.failure_file.read_text()) if self.failure_file.exists() else None
        if known is not None and known["attempt"] == attempt:
            return
        content = {"sentence": sentence, "exit_code": exit_code, "attempt": attempt}
        write_atomically(self.failure_file, json.dumps(content))

    def take_failure(self, except_of: str | None = None) -> dict[str, Any] | None:
        """Remove the reported failure and return it; None if there is none.

        A failure of the attempt `except_of` is neither removed nor returned.
        """
        if not self.failure_file.exists():
            return None
        found: dict[str, Any] = json.loads(self.failure_file.read_text())
        if found["attempt"] == except_of:
            return None
        with writing(self.failure_file):
            self.failure_file.unlink()
        del found["attempt"]
        return found

    def raise_failure(self, log_file: Path) -> None:
        """Raise what a process left as it would have: UserError or ComponentFailure.

        A process that could not even write that left nothing; then the disk is the cause.
        """
        self.check_there()
        left = self.take_failure()
        if left is None:
            return check_room(self.path, _FAILURE_BYTES)
        if left["exit_code"] == 2:
            raise UserError(left["sentence"])
        raise ComponentFailure(f"{left['sentence']}; the log is {log_file}")

    def check_there(self) -> None:
        """Check that the run directory still exists while the run continues.

        Raises:
            ComponentFailure: The directory was moved or removed.
        """
        if not self.config_file.exists():
            raise ComponentFailure(
                f"{self.path} was moved or removed while the run went on: put it back in place of "
                f"what was made there since, then go on with --resume {self.path}"
            )

    def report_outcome(self, outcome: RunOutcome) -> None:
        """Report to the process of the rollout side that the trainers are done."""
        write_atomically(self.outcome_file, outcome.value)

    def outcome(self, earlier: int = 0) -> RunOutcome | None:
        """The trainers' outcome; None while they run, or when they have failed.

        `earlier`: the stamp of an outcome that does not count. Raises UserError for a damaged one.
        """
        if self.outcome_stamp() in (0, earlier):
            return None
        text = self.outcome_file.read_text(errors="replace")
        found = next((outcome for outcome in RunOutcome if outcome.value == text), None)
        if found is None:
            raise UserError(
                f"{self.outcome_file} holds {text[:40]!r}: write {' or '.join(RunOutcome)} there"
            )
        return found

    def outcome_stamp(self) -> int:
        """A number that each outcome has for itself; 0: there is none."""
        try:
            return self.outcome_file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def write_atomically(
    path: Path, text: str, *, private: bool = False, durable: bool = False
) -> None:
    """All of `text` or nothing, also for a reader at the same time. Raises CannotWrite.

    `private`: nobody but this user can read it; `durable`: it survives a power loss.
    """
    with writing(path), replacing(path, durable=durable) as temporary:
        temporary.touch(mode=0o600 if private else 0o666)
        temporary.write_text(text)
