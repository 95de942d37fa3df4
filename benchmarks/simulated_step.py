"""Compares the simulated and the measured step time of the quickstart's schedule, on a CPU.

    python -m benchmarks.simulated_step --model runs/quickstart/sft

1. The profiler of `profile-engine` measures decode and prefill of an SGLang engine on this machine.
2. A real training with the quickstart's schedule and one trainer rank runs on that engine.
3. The simulator gets the profile, the response lengths, and the mean seconds of training and weight
   updates in the *first* half of the steps. It predicts the rollout time and the step time.
4. The prediction is compared with the measurements in the *second* half of the steps.

The simulator gets no measured rollout time. The scheduler makes the decisions, and the cost model
gives the times of decode batches of changing size and of the prefill of resumed requests. The goal
is a difference of at most 15 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import yaml

from benchmarks.papers.training import engine, quickstart_adam, run_on
from benchmarks.reporting import publish, table
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import build_simulation, merge
from megatron_async.engines.sglang.client import SGLangClient
from megatron_async.run_directory import RunDirectory
from megatron_async.simulate.build import simulate
from megatron_async.simulate.profile_engine import profile
from megatron_async.simulate.statistics import Summary
from megatron_async.store.reader import StoreReader
from megatron_async.telemetry.metrics import read_metrics

GOAL = 0.15
BATCHES = (1, 8, 24, 48, 96)
CONTEXTS = (16, 96)
NEW_TOKENS = 192
COST_MODEL = "engine.yaml"


def settings(model: Path, root: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return the quickstart's settings with one rank and a learning rate near 0."""
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
            # The policy must not learn, because then responses could be longer in the second half
            # than in the first.
            "optimizer": {"lr": 1e-12, "warmup_steps": 0},
        },
    )


def measure_engine(config: RunConfig, url: str, cost_model: Path) -> None:
    """Profile the engine at `url`; write its cost model to `cost_model`."""

    async def run() -> dict[str, Any]:
        client = await SGLangClient.connect("profiled", url, config.engines)
        try:
            async with asyncio.timeout(600):
                return await profile(client, list(BATCHES), list(CONTEXTS), NEW_TOKENS)
        finally:
            await client.close()

    cost_model.write_text(yaml.safe_dump(asyncio.run(run()), sort_keys=False))


def response_lengths(directory: RunDirectory) -> list[int]:
    """Return the lengths of the finished responses in the run's store."""
    with closing(StoreReader(directory.store_file)) as reader:
        return [s.tokens for s in reader.summaries() if s.finish_reason is not None and s.tokens]


def measure_both(base: dict[str, Any], root: Path) -> RunDirectory:
    """Start an engine, write its profile to `root / COST_MODEL`, train on it; return the run."""
    config = build_config(base)
    with engine(config, root / "engine.log") as url:
        measure_engine(config, url, root / COST_MODEL)
        return run_on(config, url)


def predict(
    base: dict[str, Any],
    first_half: list[dict[str, Any]],
    lengths: list[int],
    root: Path,
    episode: Mapping[str, Any] = MappingProxyType({}),
) -> Summary:
    """Simulate the measured run; return the simulator's results.

    Args:
        base: Settings of the measured run.
        first_half: Metrics of the first half of the steps; only the seconds of training and weight
            updates are used.
        lengths: Lengths of the responses; for episodes, of the responses of all turns.
        root: Directory with the engine's cost model.
        episode: Settings `simulate.episode`; empty without episodes.
    """
    recorded = root / "lengths.json"
    recorded.write_text(json.dumps(lengths))

    def mean(metric: str) -> float:
        return float(np.mean([line[metric] for line in first_half]))

    given = {
        "cost_model": str(root / COST_MODEL),
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
    parser.add_argument(
        "--steps", type=int, default=24, help="number of measured steps, in two halves"
    )
    parser.add_argument(
        "--warm-up", type=int, default=4, help="number of earlier steps that are not measured"
    )
    parser.add_argument("--out", type=Path, help="file to which the table is also written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="simulated-step-") as scratch:
        root = Path(scratch)
        base = settings(options.model, root, options)
        directory = measure_both(base, root)
        lines, lengths = read_metrics(directory.metrics_file), response_lengths(directory)
        lines = lines[options.warm_up :]
        half = len(lines) // 2
        summary = predict(base, lines[:half], lengths, root)
    title = "The simulator against a real run: seconds of a step"
    text = compare(summary, lines[half:], lengths)
    publish("benchmarks.simulated_step", title, text, options.out)


def compare(simulated: Summary, measured: list[dict[str, Any]], lengths: list[int]) -> str:
    """Return a table of simulated and measured seconds, and whether the goal is reached."""

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
            table("s a step | simulated | measured | difference", rows),
            f"The step times differ by {error:.1%}, which is {outcome} the goal of {GOAL:.0%}. The "
            f"{len(lengths)} responses have a mean length of {np.mean(lengths):.1f}. The mean lag "
            f"is {simulated.lag_mean:.2f} simulated and {mean('rollout/lag_mean'):.2f} measured.",
        ]
    )


if __name__ == "__main__":
    main()
