"""The package as a library: train from a script or a notebook, look at a run in one line."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_async.commands.train import start_run
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.errors import UserError
from megatron_async.run_directory import RunDirectory
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics


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

    def store(self) -> StoreReader:
        """Open its trajectories; close it, or use `contextlib.closing`."""
        return StoreReader(RunDirectory(self.path).store_file)


def open_run(path: Path | str) -> Run:
    """Open the run at `path`. Raises UserError when there is none."""
    directory, config = RunDirectory.find(path, [])
    return Run(directory.path, config)


def train(config: RunConfig, reward: str | Callable[..., Any] | None = None) -> Run:
    """Run `config` on this machine to its end, with progress on the standard output.

    `reward`: a function or class of a module or script (not of a notebook cell), or its import
    path. Scorers import it in processes of their own, so a script calls `train` under
    `if __name__ == "__main__":`. Raises UserError or ComponentFailure.
    """
    if reward is not None:
        path = reward if isinstance(reward, str) else import_path_of(reward)
        own = {"reward": path}
        values = config.model_dump(mode="json", exclude_unset=True)  # what is not may be derived
        config = build_config(merge(values, own)).with_given(merge(config.given, own))
    directory = start_run(config, "megatron_async.train")
    return Run(directory.path, config)


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
