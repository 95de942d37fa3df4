"""Trains the quickstart's model on one warm engine, for benchmarks of learning.

Each run is a whole training in this process (`megatron_async.testing.local`), with one trainer
rank, the scheduler, the store and reasoning-gym's scorer. All runs of a script start from the same
fine-tuned model, which the quickstart leaves in runs/NAME/sft, and train on the same number of
trajectories.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.report import parser
from benchmarks.reporting import ROOT, table
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.process_backends.local import local_backend
from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.interface import NoScorers
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.testing.local import train_locally

GROUP = 8
ADAM: dict[str, Any] = {
    "optimizer": {"name": "adam", "lr": 2e-4, "schedule": "constant", "warmup_steps": 5},
    "sft": {"optimizer": {"name": "adam", "lr": 3e-3}},
}
Line = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """A finished run: metrics of each step, and greedy accuracy before and after it in percent."""

    name: str
    lines: list[Line]
    before: float
    after: float

    def mean(self, metric: str) -> float:
        """Return the mean over the steps that have the metric; NaN if no step has it."""
        values = self.series(metric)
        return float(np.mean(values)) if values else float("nan")

    def largest(self, metric: str) -> float:
        return max(self.series(metric), default=float("nan"))

    def series(self, metric: str) -> list[float]:
        """Return the values of a metric in the order of steps."""
        return [float(line[metric]) for line in self.lines if metric in line]

    @property
    def final_reward(self) -> float:
        """Mean reward over the last quarter of the steps."""
        rewards = self.series("rollout/reward_mean")
        return float(np.mean(rewards[-max(1, len(rewards) // 4) :]))

    def columns(self) -> dict[str, str]:
        """Return the cells of this run's row in a table of trainings, by column header."""
        lag = self.mean("rollout/lag_mean")
        most = self.largest("rollout/lag_max")
        return {
            "accuracy before": f"{self.before:.1f} %",
            "after": f"{self.after:.1f} %",
            "reward, last quarter": f"{self.final_reward:.3f}",
            "ESS": f"{self.mean('off_policy/ess'):.3f}",
            "mean lag": f"{lag:.2f}",
            "largest lag": f"{most:.0f}",
            "lag mean / max": f"{lag:.2f} / {most:.0f}",
            "generations": str(len(self.lines)),
            "s/step": f"{self.mean('time/step'):.2f}",
        }


def training_table(first: str, runs: Mapping[str, Training], *columns: str) -> str:
    """Return a Markdown table with a row for each run.

    Args:
        first: Header of the first column, which has the names of runs.
        runs: Trainings by name.
        *columns: Headers of the other columns, from `Training.columns`.
    """
    rows = [[name, *(run.columns()[column] for column in columns)] for name, run in runs.items()]
    return table(" | ".join([first, *columns]), rows)


def quickstart_adam() -> dict[str, Any]:
    """Return the quickstart's settings with Adam instead of Muon.

    The quickstart trains with Muon since 23 November 2026. The tables in results/ were measured
    with Adam, because all compared systems have Adam. Their runs start from the model of
    `launch/quickstart.sh` with the settings `sft.optimizer.name=adam sft.optimizer.lr=3e-3
    sft.steps=900 sft.examples=57600 model.dtype=float32`.
    """
    return merge(read_yaml(ROOT / "configs" / "quickstart.yaml"), ADAM)


def training_parser(doc: str | None, name: str, steps: int) -> argparse.ArgumentParser:
    """Return a parser with the options of every script that trains.

    Args:
        doc: Docstring of the script.
        name: Name of the script.
        steps: Default of `--steps`.
    """
    out = parser(doc, name)
    out.add_argument("--model", type=Path, required=True, help="fine-tuned quickstart model")
    out.add_argument("--steps", type=int, default=steps, help="batches of each run")
    out.add_argument("--groups", type=int, default=16, help="groups of 8 in a batch")
    out.add_argument("--seed", type=int, default=1)
    return out


def run_on(config: RunConfig, url: str) -> RunDirectory:
    """Make a whole run in this process on the engine at `url`; return its run directory.

    Raises:
        UserError: As for any run.
        ComponentFailure: As for any run.
    """
    directory = RunDirectory.create(config)
    pool = LocalScorerPool(config.scorers, config.model.path)
    scorers = pool if config.scores else NoScorers()
    try:
        with local_backend(directory.logs) as backend:
            workers = EnvironmentWorkers(config, backend) if config.has_episodes else None
            train_locally(config, directory, [url], scorers, workers)
    finally:
        pool.close()
    return directory


def train(config: RunConfig, url: str) -> Training:
    """Make a whole run on the engine at `url`; return its metrics and accuracies."""
    print(config.name, file=sys.stderr, flush=True)
    directory = run_on(config, url)
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    before, after = (100 * evaluations[i]["eval/accuracy"] for i in (0, -1))
    return Training(config.name, read_metrics(directory.metrics_file), before, after)


def configure(
    name: str, overrides: dict[str, Any], model: Path, root: Path, options: argparse.Namespace
) -> RunConfig:
    """Return the settings of a run.

    `overrides` are applied to the quickstart's settings without its schedule and recipe.
    """
    base = {**quickstart_adam(), "schedule": {}, "algorithm": {}}
    common = {
        "name": name,
        "root": str(root),
        "steps": options.steps,
        "seed": options.seed,
        "model": {"path": str(model)},
        "parallel": {"ranks": 1, "tensor": 1},
        "schedule": {"groups_per_batch": options.groups, "group_size": GROUP, "concurrency": 96},
        "checkpoint": {"every_steps": 10_000, "export_hf": False},
        "telemetry": {"record_events": False},
    }
    return build_config(merge(merge(base, common), overrides))


@contextmanager
def engine(config: RunConfig, log: Path) -> Iterator[str]:
    """Start an engine for the run's model; yield its URL, and stop the engine at the end."""
    process = SGLangProcess(Path(config.model.path), config.engines, log)
    process.start()
    try:
        yield process.url
    finally:
        process.stop()


@contextmanager
def bench(
    model: Path, options: argparse.Namespace
) -> Iterator[Callable[[str, dict[str, Any]], Training]]:
    """Start an engine for `model`; yield a function that trains with given settings on it."""
    with tempfile.TemporaryDirectory(prefix="papers-") as scratch:
        root = Path(scratch)
        with engine(configure("engine", {}, model, root, options), root / "engine.log") as url:
            yield lambda name, changes: train(configure(name, changes, model, root, options), url)


NO_MEASURE = (
    "Two CPU cores, possibly shared with other work: compare seconds only in one table. One seed."
)
