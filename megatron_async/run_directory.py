"""Reads and writes a run directory: `runs/<name>/{config.yaml, metrics.jsonl, checkpoints/, ...}`.

Invariants
- A directory is a run if it has a config.yaml, which is written last, when the rest of the
  directory is complete.
- A new run never writes into the directory of another run; only `--resume` continues a run.
- Settings are written only under the run's lock (`launcher/run_lock.py`), and read by the run's
  processes.
- Processes of a run communicate by the calls of `process_backends`, by collectives, or by small
  files in the run directory, which are written atomically.
- If config.yaml contains the engines' API key, only the user can read it, already while it is
  written.
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
from megatron_async.files.disk import CannotWrite, check_free_space, replacing, writing

_FAILURE_BYTES: Final = 1 << 16


class RunOutcome(StrEnum):
    """How the trainer ranks of a run ended, if they did not fail."""

    COMPLETE = "complete"
    STOPPED = "stopped"


@dataclass(frozen=True)
class _PathOf:
    """Descriptor that gives a `RunDirectory` the path of the file or directory with this name."""

    name: str

    def __get__(self, run: "RunDirectory", owner: "type[RunDirectory]") -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class RunDirectory:
    """The directory of one run: paths of its files, and access to the small files in it."""

    path: Path
    config_file = _PathOf("config.yaml")
    resume_file = _PathOf("config.resume.yaml")
    """Settings of a resume that has not started yet. When it starts, they are written to
    `config_file`."""
    metrics_file = _PathOf("metrics.jsonl")
    tensorboard = _PathOf("tensorboard")
    checkpoints = _PathOf("checkpoints")
    store_file = _PathOf("trajectories.sqlite")
    events = _PathOf("events")
    """Directory of recorded scheduler events. Each file belongs to one lineage, which is one start
    of the trainer."""
    logs = _PathOf("logs")
    ray_token_file = _PathOf("ray-token")
    """Key of the Ray cluster that the run has started (`cluster: ray` on one machine), while the
    cluster is running."""
    tokenizer_file = _PathOf("tokenizer.sha256")
    """Digest of the tokenizer and chat template with which the run was started. A resume must use
    the same ones."""
    data_file = _PathOf("data.json")
    """Identity of the data files that the run reads: the size and a hash of each file (see
    `tasks.data_identity`)."""
    id_file = _PathOf("id")
    """Random name of the run, which is part of the names of its directories outside the run
    directory."""
    lineage_file = _PathOf("lineage")
    lock_file = _PathOf("run.lock")
    """File that the launch which is running the run has locked."""
    hf_export = _PathOf("hf")
    failure_file = _PathOf("failure.json")
    failed_start_file = _PathOf("failed_start")
    """Error message of a launch that failed before its first step."""
    outcome_file = _PathOf("outcome")

    def never_trained(self) -> bool:
        """Return whether a launch of this run has failed and no launch has trained a step."""
        return self.failed_start_file.exists() and not self._has_trained()

    def check_free(self, *, resumable: bool = True) -> None:
        """Raise a UserError if a run already has this directory.

        `resumable` is whether the error message suggests to resume that run.
        """
        if self.config_file.exists():
            remedy = f" or resume the run with --resume {self.path}" if resumable else ""
            raise UserError(
                f"run directory {self.path} exists already: choose another name "
                f"(got name {self.path.name!r}){remedy}"
            )

    def note_failed_start(self, message: str) -> None:
        """Record the error message of a launch that failed, unless the run has trained a step."""
        if self.path.exists() and not self._has_trained():
            write_atomically(self.failed_start_file, message)

    def _has_trained(self) -> bool:
        """Return whether the run has trained a step: it has a checkpoint or metrics of a step."""
        if any(self.checkpoints.glob("*/manifest*.json")):
            return True
        lines = self.metrics_file.open(errors="replace") if self.metrics_file.exists() else ()
        return any('"kind": "train"' in line for line in lines)

    def set_aside(self) -> Path:
        """Rename the directory to NAME.failed-N with the first free number; return its new path."""
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.failed-{number}")).exists():
            number += 1
        return self.path.rename(target)

    @classmethod
    def create(
        cls, config: RunConfig, data: Mapping[str, Any] | None = None, *, resumable: bool = True
    ) -> "RunDirectory":
        """Create the directory of a new run with its settings; return it.

        Args:
            config: The run's settings.
            data: Identity of the run's data files (`tasks.data_identity`); None to record none.
            resumable: Whether the error for a directory that exists suggests to resume that run.

        Raises:
            UserError: If the directory already has a run, or cannot be written.
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
        """Return the run directory that the settings name; it need not exist."""
        return cls((Path(config.root) / config.name).absolute())

    @classmethod
    def find(
        cls, path: Path | str, overrides: list[str], named_by: str = "run directory"
    ) -> "tuple[RunDirectory, RunConfig]":
        """Return an existing run directory, and its settings with `overrides`; write nothing.

        Args:
            path: The run directory.
            overrides: Settings as `section.name=value` that replace settings of the run.
            named_by: Origin of the path, such as an option, for the error message.

        Raises:
            UserError: If there is no run at `path`, or a setting is invalid.
        """
        directory = cls(Path(path).absolute())
        if not directory.config_file.exists():
            raise UserError(f"{named_by} {path}: there is no run (no config.yaml) in it")
        return directory, load_run_config(directory.config_file, overrides)

    @classmethod
    def launched(cls, path: Path | str) -> "tuple[RunDirectory, RunConfig]":
        """Return an existing run directory and the settings of its current launch.

        The processes of a launch call this. If the launch is a resume that has not started yet, the
        settings are in `resume_file`, otherwise in `config_file`.
        """
        directory, config = cls.find(path, [])
        file = directory.resume_file
        return directory, load_run_config(file) if file.exists() else config

    def save_config(self, config: RunConfig) -> None:
        """Write the run's settings to config.yaml, from which the other processes of the run and a
        later resume read them."""
        write_atomically(self.config_file, dump(config), private=bool(config.engines.api_key))

    def prepare_resume(self, config: RunConfig) -> None:
        """Write the settings of a resume to `resume_file`. They become the run's settings only when
        the resume has started, so that a resume which fails before changes nothing."""
        write_atomically(self.resume_file, dump(config), private=bool(config.engines.api_key))

    def begin(self, data: Mapping[str, Any] | None = None) -> None:
        """Mark a launch as started: make the settings of a resume the run's settings, and remove
        the outcome of an earlier launch.

        This is called when trainers and engines have loaded the weights. `data` is the identity of
        the data files that the launch reads; None to keep the recorded one.
        """
        # The outcome is removed before the settings change: with the new settings, the run may have
        # more steps, so it must not count as complete.
        self.outcome_file.unlink(missing_ok=True)
        if self.resume_file.exists():
            self._save_data(data)
            self.resume_file.replace(self.config_file)

    def _save_data(self, data: Mapping[str, Any] | None) -> None:
        """Write the identity of the data files, unless it is None."""
        if data is not None:
            write_atomically(self.data_file, json.dumps(data, indent=1))

    def data_identity(self) -> dict[str, Any]:
        """Return the recorded identity of the run's data files; empty if none is recorded.

        Raises:
            UserError: If the file cannot be read.
        """
        file = self.data_file
        return read_json_object(file, f"{file}") if file.exists() else {}

    def weights_directory(self, parent: str) -> Path:
        """Return the directory in which this run, and no other, publishes weights.

        Args:
            parent: `weights.directory`; empty for a directory inside the run directory.
        """
        if not parent:
            return self.path / "weights"
        if not self.id_file.exists():
            write_atomically(self.id_file, f"{self.path.name}-{secrets.token_hex(8)}")
        # The inode number makes the name different for a copy of the run directory. It stays the
        # same if the directory is moved.
        return Path(parent) / f"{self.id_file.read_text()}-{self.id_file.stat().st_ino:x}"

    def tokenizer_digest(self) -> str:
        """Return the digest of the tokenizer that the run started with; empty if none is recorded.

        Runs of earlier versions of this program have none.
        """
        return self.tokenizer_file.read_text() if self.tokenizer_file.exists() else ""

    def next_lineage(self) -> int:
        """Return a new lineage number of this run (0, 1, 2, ...) and record it durably.

        A lineage is the part of a run between one start of the trainer and the next one. No two
        lineages get the same number, even after a power loss.
        """
        lineage = self.lineages_so_far()
        write_atomically(self.lineage_file, f"{lineage}\n{lineage}\n", durable=True)
        return lineage

    def lineages_so_far(self) -> int:
        """Return the number of lineages that the run has had, which is how often its trainer was
        started.

        If a lineage number were used twice, two different policies could have the same policy
        version. Therefore the file contains the newest number twice: if it is damaged, the two
        differ.

        Raises:
            UserError: If the number is missing or damaged.
        """
        counter = self.lineage_file
        text = counter.read_text(errors="replace") if counter.exists() else ""
        numbers = set(text.split())
        if len(numbers) == 1 and (number := numbers.pop()).isdecimal():
            return int(number) + 1
        if not counter.exists() and not self.store_file.exists() and not self._has_trained():
            return 0
        what = f"holds {text[:40]!r}, not one number" if counter.exists() else "is missing"
        raise UserError(
            f"{counter}, the number of the run's newest lineage, {what}: write it there again (the "
            f"last line of {self.metrics_file} has it as 'lineage'; a larger number is safe too)"
        )

    def report_failure(self, message: str, exit_code: int, attempt: str = "") -> None:
        """Write the message of a failure to `failure_file`, for the launcher.

        The file keeps only the first failure of an attempt (one start of all trainer ranks). A
        failure of an earlier attempt is replaced.

        Args:
            message: The message.
            exit_code: Exit code with which the failed process ends.
            attempt: Identity of the attempt, from `train_loop.attempt.current_attempt`.
        """
        known = json.loads(self.failure_file.read_text()) if self.failure_file.exists() else None
        if known is not None and known["attempt"] == attempt:
            return
        content = {"message": message, "exit_code": exit_code, "attempt": attempt}
        write_atomically(self.failure_file, json.dumps(content))

    def pop_failure(self, except_of: str | None = None) -> dict[str, Any] | None:
        """Remove the reported failure and return it; None if there is none.

        If the failure was reported by the attempt `except_of` (an identity as for
        `report_failure`), it stays, and None is returned.
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
        """Raise the failure that a process of the run has reported, with its message and type.

        If no failure is reported, the process may have been unable to write its report. So if the
        disk is full or not writable, a ComponentFailure says that; otherwise nothing is raised.

        Args:
            log_file: The process's log, which the message names.

        Raises:
            UserError: If the reported exit code is 2.
            ComponentFailure: If it is another one, or the run directory is missing or cannot be
                written.
        """
        self.check_exists()
        left = self.pop_failure()
        if left is None:
            return check_free_space(self.path, _FAILURE_BYTES)
        if left["exit_code"] == 2:
            raise UserError(left["message"])
        raise ComponentFailure(f"{left['message']}; the log is {log_file}")

    def check_exists(self) -> None:
        """Raise a ComponentFailure if the run directory was moved or removed during the run."""
        if not self.config_file.exists():
            raise ComponentFailure(
                f"{self.path} was moved or removed during the run: move it back, replacing what "
                f"was made there since, then continue with --resume {self.path}"
            )

    def report_outcome(self, outcome: RunOutcome) -> None:
        """Write how the trainer ranks ended. On a cluster, the launcher on the first rollout node
        waits for this."""
        write_atomically(self.outcome_file, outcome.value)

    def outcome(self, earlier: int = 0) -> RunOutcome | None:
        """Return how the trainer ranks ended; None while they are running or if they have failed.

        `earlier` is the result of `outcome_stamp` before the launch. An outcome with this stamp
        belongs to an earlier launch and is ignored.

        Raises:
            UserError: If the file is damaged.
        """
        if self.outcome_stamp() in (0, earlier):
            return None
        text = self.outcome_file.read_text(errors="replace")
        found = next((outcome for outcome in RunOutcome if outcome.value == text), None)
        if found is None:
            raise UserError(
                f"{self.outcome_file} holds {text[:40]!r}; write {' or '.join(RunOutcome)} there"
            )
        return found

    def outcome_stamp(self) -> int:
        """Return a number that identifies the present outcome file (its time of change); 0 if there
        is none."""
        try:
            return self.outcome_file.stat().st_mtime_ns
        except FileNotFoundError:
            return 0


def write_atomically(
    path: Path, text: str, *, private: bool = False, durable: bool = False
) -> None:
    """Write `text` to the file `path` so that readers see the old or the new content, never a mix.

    Args:
        path: The file.
        text: Its new content.
        private: Whether only this user may read the file.
        durable: Whether the content must survive a power loss.

    Raises:
        CannotWrite: If the file cannot be written.
    """
    with writing(path), replacing(path, durable=durable) as temporary:
        temporary.touch(mode=0o600 if private else 0o666)
        temporary.write_text(text)
