"""Every recipe on the quickstart task for equal samples, and importance sampling on and off.

    python benchmarks/recipes.py --model runs/quickstart/sft --out benchmarks/results/recipes.md

All runs start from the same fine-tuned model (the quickstart leaves one in runs/NAME/sft), share
a warm SGLang engine and one trainer rank, and train on the same number of trajectories. Accuracy is
greedy on held-out problems. The ablation makes data stale on purpose (many updates on one batch, a
high learning rate) and trains once with the ratio against the policy that wrote each token, once
with it ignored (`correction.preset: disabled`).
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.config.recipes import RECIPES
from megatron_async.rollout.sglang_process import SGLangProcess
from megatron_async.run.directory import RunDirectory
from megatron_async.run.local import train_locally
from megatron_async.tasks.verifier import LocalVerifierPool
from megatron_async.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]
GROUP = 8


@dataclass(frozen=True)
class Row:
    """One run: accuracies in percent, reward and spread over its last quarter."""

    name: str
    before: float
    after: float
    reward: float
    worst_drop: float
    seconds: float
    ess: float
    lag_mean: float
    lag_max: float


def configure(
    name: str, overrides: dict[str, Any], root: Path, options: argparse.Namespace
) -> RunConfig:
    """The quickstart's settings, without its own schedule and recipe."""
    base = {**read_yaml(ROOT / "configs" / "quickstart.yaml"), "schedule": {}, "algorithm": {}}
    common = {
        "name": name,
        "root": str(root),
        "steps": options.steps,
        "seed": options.seed,
        "model": {"path": str(options.model)},
        "parallel": {"ranks": 1, "tensor": 1},
        "schedule": {"groups_per_batch": options.groups, "group_size": GROUP, "concurrency": 96},
        "checkpoint": {"every_steps": 10_000, "export_hf": False},
        "telemetry": {"record_events": False},
    }
    return build_config(merge(merge(base, common), overrides))


def measure(config: RunConfig, url: str) -> Row:
    """Train to the end on the warm engine and read what the run wrote."""
    directory = RunDirectory.create(config)
    verifier = LocalVerifierPool(config.task, config.model.path)
    began = time.monotonic()
    try:
        train_locally(config, directory, [url], verifier)
    finally:
        verifier.close()
    lines = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    rewards = np.array([line["rollout/reward_mean"] for line in lines])
    return Row(
        config.name,
        100 * evaluations[0]["eval/accuracy"],
        100 * evaluations[-1]["eval/accuracy"],
        float(rewards[-max(1, len(rewards) // 4) :].mean()),
        float((np.maximum.accumulate(rewards) - rewards).max()),
        time.monotonic() - began,
        float(np.mean([line["off_policy/ess"] for line in lines])),
        float(np.mean([line["rollout/lag_mean"] for line in lines])),
        max(line["rollout/lag_max"] for line in lines),
    )


def table(rows: list[Row]) -> str:
    """Markdown."""
    out = [
        "| run | accuracy before | after | reward, last quarter | largest fall of reward "
        "| wall s | ESS | lag mean / max |",
        "|---|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {r.name} | {r.before:.1f} % | {r.after:.1f} % | {r.reward:.3f} | {r.worst_drop:.3f} "
        f"| {r.seconds:.0f} | {r.ess:.3f} | {r.lag_mean:.2f} / {r.lag_max:.0f} |"
        for r in rows
    ]
    return "\n".join(out)


def ablation(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The same stale data with importance sampling and without."""
    stale = {
        "schedule": {"preset": "sync", "updates_per_batch": options.stale_updates},
        "optimizer": {"lr": options.stale_lr},
    }
    return {
        "is-on": merge(stale, {"algorithm": {"recipe": "copris"}}),
        "is-off": merge(
            stale,
            {"algorithm": {"recipe": "copris", "correction": {"preset": "disabled"}}},
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="fine-tuned quickstart model")
    parser.add_argument("--recipes", nargs="*", default=[r for r in RECIPES if r != "sft"])
    parser.add_argument("--steps", type=int, default=20, help="batches of each run")
    parser.add_argument("--groups", type=int, default=32, help="groups of 8 in a batch")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stale-updates", type=int, default=16, help="ablation: updates a batch")
    parser.add_argument("--stale-lr", type=float, default=3e-4, help="ablation: learning rate")
    parser.add_argument("--no-ablation", action="store_true")
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()
    runs: dict[str, dict[str, Any]] = {
        recipe: {"algorithm": {"recipe": recipe}} for recipe in options.recipes
    }
    if not options.no_ablation:
        runs |= ablation(options)
    rows = []
    with tempfile.TemporaryDirectory(prefix="recipes-") as scratch:
        root = Path(scratch)
        engines = configure("engine", {}, root, options).engines
        process = SGLangProcess(options.model, engines, root / "engine.log")
        process.start()
        try:
            for name, overrides in runs.items():
                rows.append(measure(configure(name, overrides, root, options), process.url))
                print(rows[-1], file=sys.stderr, flush=True)
        finally:
            process.stop()
    text = table(rows)
    print(text)
    if options.out is not None:
        command = "python benchmarks/recipes.py " + " ".join(sys.argv[1:])
        options.out.write_text(f"`{command}`, {datetime.date.today()}\n\n{text}\n")


if __name__ == "__main__":
    main()
