"""Simulated against measured: the step time of the quickstart's schedule on the CPU engine.

    python -m benchmarks.simulated_step --model runs/quickstart/sft

1. `profile-engine` measures decode and prefill of a real SGLang engine on this machine.
2. A real training with the quickstart's schedule runs on that engine (one trainer rank).
3. The simulator gets the profile, the trainer's and the weight update's mean seconds of the
   *first* half of the steps, and the lengths of the responses; it predicts rollout and step time.
4. Both are compared over the *second* half.

The simulator gets nothing of the rollout time: the scheduler's decisions, the decode batch as it
shrinks and grows, prefill of resumed requests come from the model. Goal: within 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml

from benchmarks.command import command_line
from benchmarks.papers.report import table
from benchmarks.quickstart_adam import quickstart_adam
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import build_simulation, merge
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.engines.sglang.process import SGLangProcess
from megatron_async.environments.workers import EnvironmentWorkers
from megatron_async.places.local import local_place
from megatron_async.run_directory import RunDirectory
from megatron_async.scoring.interface import NoScorers
from megatron_async.scoring.pool import LocalScorerPool
from megatron_async.simulate.build import simulate
from megatron_async.simulate.profile_engine import profile
from megatron_async.simulate.statistics import Summary
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics
from megatron_async.testing.local import train_locally

GOAL = 0.15
BATCHES = (1, 8, 24, 48, 96)
CONTEXTS = (16, 96)
NEW_TOKENS = 192


def settings(model: Path, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The quickstart's, in one process."""
    return merge(
        quickstart_adam(),
        {
            "name": "measured",
            "root": str(root),
            "steps": options.warm_up + options.steps,
            "model": {"path": str(model)},
            "parallel": {"ranks": 1, "tensor": 1},
            "eval": {"prompts": 8},
            "checkpoint": {"every_steps": 10_000, "export_hf": False},
            # Nothing is learned: responses that get longer from the first half to the second would
            # be compared with what they were before.
            "optimizer": {"lr": 1e-12, "warmup_steps": 0},
        },
    )


def measure_engine(config: RunConfig, url: str) -> dict[str, Any]:
    """The engine's cost model."""

    async def run() -> dict[str, Any]:
        client = await SGLangClient.connect("profiled", url, config.engines)
        try:
            async with asyncio.timeout(600):
                return await profile(client, list(BATCHES), list(CONTEXTS), NEW_TOKENS)
        finally:
            await client.close()

    return asyncio.run(run())


def train(config: RunConfig, url: str) -> RunDirectory:
    """A whole run in this process, on the engine at `url`."""
    directory = RunDirectory.create(config)
    pool = LocalScorerPool(config.scorers, config.model.path)
    scorers = pool if config.scores else NoScorers()
    try:
        with local_place(directory.logs) as place:
            workers = EnvironmentWorkers(config, place) if config.plays else None
            train_locally(config, directory, [url], scorers, workers)
    finally:
        pool.close()
    return directory


def measure_run(config: RunConfig, url: str) -> tuple[list[dict[str, Any]], list[int]]:
    """Metrics by step, and the lengths of finished responses."""
    directory = train(config, url)
    reader = StoreReader(directory.store_file)
    try:
        lengths = [s.tokens for s in reader.summaries() if s.finish_reason is not None and s.tokens]
    finally:
        reader.close()
    return read_metrics(directory.metrics_file), lengths


def predict(
    base: dict[str, Any],
    first_half: list[dict[str, Any]],
    lengths: list[int],
    root: Path,
    episode: Mapping[str, Any] = MappingProxyType({}),
) -> Summary:
    """The simulator's figures; only trainer and update seconds come from the run's first half.

    `episode`: settings of episodes, whose `lengths` are those of answers.
    """
    recorded = root / "lengths.json"
    recorded.write_text(json.dumps(lengths))

    def mean(metric: str) -> float:
        return float(np.mean([line[metric] for line in first_half]))

    given = {
        "cost_model": str(root / "engine.yaml"),
        "lengths": {"distribution": "file", "path": str(recorded), "prompt_tokens": 20},
        "trainer_seconds_per_token": 1e-12,
        "trainer_seconds_per_update": mean("time/train"),
        "weight_update_seconds": mean("time/publish"),
        "efficiency": {"batch_overhead_seconds": 0.0},
        "reward": {"scorer_seconds": 0.0},
        "load_report_seconds": 1.0,
        "steps": 80,
        "warmup_steps": 20,
        "episode": dict(episode),
    }
    return simulate(build_simulation(merge(base, {"simulate": given})))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned quickstart model")
    parser.add_argument("--steps", type=int, default=24, help="measured steps (two halves)")
    parser.add_argument("--warm-up", type=int, default=4, help="steps left out before them")
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simulated-step-") as scratch:
        root = Path(scratch)
        base = settings(options.model, root, options)
        config = build_config(base)
        process = SGLangProcess(
            options.model,
            config.engines,
            root / "engine.log",
        )
        process.start()
        try:
            costs = measure_engine(config, process.url)
            (root / "engine.yaml").write_text(yaml.safe_dump(costs, sort_keys=False))
            lines, lengths = measure_run(config, process.url)
        finally:
            process.stop()
        lines = lines[options.warm_up :]
        half = len(lines) // 2
        summary = predict(base, lines[:half], lengths, root)
    text = compare(summary, lines[half:], lengths)
    print(text)
    if options.out is not None:
        command = command_line("benchmarks.simulated_step")
        title = "# The simulator against a real run: seconds of a step"
        made = f"`{command}`, {datetime.date.today()}, {os.cpu_count()} cores"
        options.out.write_text(f"{title}\n\n{made}\n\n{text}\n")


def compare(simulated: Summary, measured: list[dict[str, Any]], lengths: list[int]) -> str:
    """A table and whether the goal is met."""

    def mean(metric: str) -> float:
        return float(np.mean([line[metric] for line in measured]))

    step = mean("time/step") - mean("time/checkpoint")
    rows = []
    for name, ours, theirs in (
        ("rollout (the trainer's wait)", simulated.rollout_seconds, mean("time/wait_for_batch")),
        ("training", simulated.train_seconds, mean("time/train")),
        ("whole step", simulated.step_seconds, step),
    ):
        rows.append((name, f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs - 1:+.1%}"))
    error = abs(simulated.step_seconds / step - 1)
    outcome = "within" if error <= GOAL else "NOT within"
    return "\n\n".join(
        [
            table(("s a step", "simulated", "measured", "difference"), rows),
            f"The step time agrees to {error:.1%}, {outcome} the goal of {GOAL:.0%}. Responses: "
            f"{len(lengths)}, mean length {np.mean(lengths):.1f}, mean lag simulated "
            f"{simulated.lag_mean:.2f}, measured {mean('rollout/lag_mean'):.2f}.",
        ]
    )


if __name__ == "__main__":
    main()
