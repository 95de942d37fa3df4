"""The package as a library: train from a script or a notebook, look at a run in one line."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.commands.train import start_run
from megatron_async.config import RunConfig, build_config, load_config
from megatron_async.config.load import with_settings
from megatron_async.errors import UserError
from megatron_async.files.disk import translating_disk_errors
from megatron_async.run_directory import RunDirectory
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import first_accuracy, read_metrics


@dataclass(frozen=True)
class Run:
    """A run directory, open for reading; the run may go on meanwhile."""

    path: Path
    config: RunConfig

    @property
    def metrics(self) -> list[dict[str, float]]:
        """List a mapping for each step that was trained (`pandas.DataFrame(run.metrics)`)."""
        return read_metrics(RunDirectory(self.path).metrics_file)

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """List a mapping for each evaluation."""
        return read_metrics(RunDirectory(self.path).metrics_file, kind="eval")

    @property
    def accuracy(self) -> float | None:
        """The held-out accuracy of the newest evaluation; None before the first."""
        evaluations = self.evaluations
        return first_accuracy(evaluations[-1]) if evaluations else None

    @property
    def export(self) -> Path | None:
        """The Hugging Face checkpoint that a complete run leaves (`checkpoint.export_hf`)."""
        path = RunDirectory(self.path).hf_export
        return path if path.exists() else None

    def store(self) -> StoreReader:
        """Open its trajectories; close it, or use `contextlib.closing`."""
        return StoreReader(RunDirectory(self.path).store_file)


def open_run(path: Path | str) -> Run:
    """Open the run at `path`. Raises UserError when there is none."""
    directory, config = RunDirectory.find(path, [])
    return Run(directory.path, config)


def train(
    config: RunConfig | Mapping[str, Any] | Path | str,
    reward: str | Callable[..., Any] | None = None,
    **settings: Any,
) -> Run:
    """Train on this machine to the end, with progress on the standard output.

    `config`: settings, or a YAML file of them. `settings` replace its own: `steps=20`,
    `model={"path": ...}`, `**{"model.path": ...}`. `reward`: a function or class of a module or
    script (not of a notebook cell), or its import path. Scorers import it in processes of their
    own, so a script calls `train` under `if __name__ == "__main__":`. An interrupt ends the run's
    processes before it is raised. Raises UserError or ComponentFailure.
    """
    if reward is not None:
        settings["reward"] = import_path_of(reward) if callable(reward) else reward
    if isinstance(config, Mapping):
        config = with_settings(build_config({}), config)
    elif not isinstance(config, RunConfig):
        config = load_config(config)
    with translating_disk_errors():
        directory = start_run(with_settings(config, settings), "megatron_async.train")
    return open_run(directory.path)


def import_path_of(thing: Callable[..., Any]) -> str:
    """`file.py:name` of a function or class at the top level of a file. Raises UserError."""
    name = getattr(thing, "__qualname__", repr(thing))
    try:
        file = inspect.getsourcefile(thing)
    except TypeError:  # an object that is neither function nor class
        file = None
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise UserError(
            f"reward is {name}, which other processes cannot import: put it at the top level of a "
            "file, and pass the function or `path/to/file.py:name`"
        )
    return f"{Path(file).resolve()}:{name}"
