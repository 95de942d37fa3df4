"""Python functions of the package: `train` trains from a script or notebook, `open_run` reads a
run."""

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
    """A run directory, open for reading, also while the run continues."""

    path: Path
    config: RunConfig

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Metrics of each training step, as one mapping per step (try
        `pandas.DataFrame(run.metrics)`)."""
        return read_metrics(RunDirectory(self.path).metrics_file)

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """Metrics of each evaluation, as one mapping per evaluation."""
        return read_metrics(RunDirectory(self.path).metrics_file, kind="eval")

    @property
    def accuracy(self) -> float | None:
        """Held-out accuracy of the newest evaluation; None before the first evaluation."""
        evaluations = self.evaluations
        return first_accuracy(evaluations[-1]) if evaluations else None

    @property
    def export(self) -> Path | None:
        """Path of the Hugging Face checkpoint that the run exports when it is complete
        (`checkpoint.export_hf`); None if it does not exist."""
        path = RunDirectory(self.path).hf_export
        return path if path.exists() else None

    def store(self) -> StoreReader:
        """Open the run's trajectories for reading; the caller closes the reader
        (`contextlib.closing`)."""
        return StoreReader(RunDirectory(self.path).store_file)


def open_run(path: Path | str) -> Run:
    """Open the run in the directory `path` for reading.

    Raises:
        UserError: The directory contains no run.
    """
    directory, config = RunDirectory.find(path, [])
    return Run(directory.path, config)


def train(
    config: RunConfig | Mapping[str, Any] | Path | str,
    reward: str | Callable[..., Any] | None = None,
    **settings: Any,
) -> Run:
    """Train on this machine until the run is complete, with progress on standard output.

    Scorer processes import the script that defines the reward. The script must therefore call
    `train` under `if __name__ == "__main__":`, or the import would start a run. Ctrl-C ends the
    run's processes and then raises KeyboardInterrupt.

    Args:
        config: Settings, or the path of a YAML file with them.
        reward: A function or class of a module or script (not of a notebook cell), or its import
            path.
        **settings: Settings that replace settings of `config`. A setting in a section is given as a
            mapping or by its dotted name: `steps=20, model={"path": ...}` or `**{"model.path":
            ...}`.

    Raises:
        UserError: Bad input.
        ComponentFailure: A component of the run failed.
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


def import_path_of(target: Callable[..., Any]) -> str:
    """Return the import path `file.py:name` of a function or class at the top level of a file.

    Raises:
        UserError: Other processes cannot import the object.
    """
    name = getattr(target, "__qualname__", repr(target))
    try:
        file = inspect.getsourcefile(target)
    except TypeError:  # `target` is neither a function nor a class.
        file = None
    if file is None or not Path(file).is_file() or not name.isidentifier():
        raise UserError(
            f"reward is {name}, which other processes cannot import. Put it at the top level of a "
            "file, and pass the function or `path/to/file.py:name`."
        )
    return f"{Path(file).resolve()}:{name}"
