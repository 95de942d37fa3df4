"""Real trainings of the quickstart model on one warm engine, for benchmarks of what is learned.

Each run is a whole training in this process (`megatron_async.testing.local`): one trainer rank, the
scheduler, the store, reasoning-gym's scorer. All runs of a script start from the same fine-tuned
model (the quickstart leaves one in runs/NAME/sft) and see equally many trajectories.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.report import parser
from benchmarks.quickstart_adam import quickstart_adam
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.testing.local import train_locally

GROUP = 8
Line = dict[str, Any]


@dataclass(frozen=True)
class Training:
    """One finished run: metrics by step, greedy accuracy before and after in percent, wall time."""

    name: str
    lines: list[Line]
    before: float
    after: float
    seconds: float

    def mean(self, metric: str) -> float:
        """Over the steps that have it; nan when none has."""
        values = self.series(metric)
        return float(np.mean(values)) if values else float("nan")

    def largest(self, metric: str) -> float:
        return max(self.series(metric), default=float("nan"))

    def series(self, metric: str) -> list[float]:
        """By step."""
        return [float(line[metric]) for line in self.lines if metric in line]

    @property
    def final_reward(self) -> float:
        """Mean over the last quarter of the steps."""
        rewards = self.series("rollout/reward_mean")
        return float(np.mean(rewards[-max(1, len(rewards) // 4) :]))


def training_parser(doc: str | None, name: str, steps: int) -> argparse.ArgumentParser:
    """Options that every script with a training has. `steps` is the default."""
    out = parser(doc, name)
    out.add_argument("--model", type=Path, required=True, help="fine-tuned quickstart model")
    out.add_argument("--steps", type=int, default=steps, help="batches of each run")
    out.add_argument("--groups", type=int, default=16, help="groups of 8 in a batch")
    out.add_argument("--seed", type=int, default=1)
    return out


class Bench:
    """A warm engine; `train` runs one configuration on it."""

    def __init__(self, model: Path, root: Path, options: argparse.Namespace, url: str) -> None:
        self._model, self._root, self._options, self._url = model, root, options, url

    def train(self, name: str, overrides: dict[str, Any]) -> Training:
        """Train to the end. Raises what a large run would raise."""
        print(name, file=sys.stderr, flush=True)
        config = configure(name, overrides, self._model, self._root, self._options)
        return train(config, self._url)


def train(config: RunConfig, url: str) -> Training:
    """Train to the end on the engine at `url`. Raises what a large run would raise."""
    directory = RunDirectory.create(config)
    pool = LocalScorerPool(config.scorers, config.model.path)
    began = time.monotonic()
    try:
        train_locally(config, directory, [url], pool)
    finally:
        pool.close()
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    return Training(
        config.name,
        read_metrics(directory.metrics_file),
        100 * evaluations[0]["eval/accuracy"],
        100 * evaluations[-1]["eval/accuracy"],
        time.monotonic() - began,
    )


def configure(
    name: str, overrides: dict[str, Any], model: Path, root: Path, options: argparse.Namespace
) -> RunConfig:
    """The quickstart's settings, without its own schedule and recipe."""
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
def bench(model: Path, options: argparse.Namespace) -> Iterator[Bench]:
    """Start an engine for `model`, stop it at the end."""
    with tempfile.TemporaryDirectory(prefix="papers-") as scratch:
        root = Path(scratch)
        engines = configure("engine", {}, model, root, options).engines
        process = SGLangProcess(model, engines, root / "engine.log")
        process.start()
        try:
            yield Bench(model, root, options, process.url)
        finally:
            process.stop()


NO_MEASURE = "Two CPU cores, possibly shared: seconds compare runs of one table at best. One seed."
