"""Every recipe on the quickstart task for equal samples, and importance sampling on and off.

    python -m benchmarks.recipes --model runs/quickstart/sft --out benchmarks/results/recipes.md

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import command_line
from benchmarks.papers.training import Training, bench
from megatron_async.config.load import merge
from megatron_async.config.recipes import RECIPES


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


def row_of(run: Training) -> Row:
    """What the table shows of a training."""
    rewards = np.array(run.series("rollout/reward_mean"))
    return Row(
        run.name,
        run.before,
        run.after,
        run.final_reward,
        float((np.maximum.accumulate(rewards) - rewards).max()),
        run.seconds,
        run.mean("off_policy/ess"),
        run.mean("rollout/lag_mean"),
        run.largest("rollout/lag_max"),
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
    with bench(options.model, options) as engine:
        for name, overrides in runs.items():
            rows.append(row_of(engine.train(name, overrides)))
            print(rows[-1], file=sys.stderr, flush=True)
    text = table(rows)
    print(text)
    if options.out is not None:
        command = command_line("benchmarks.recipes")
        options.out.write_text(f"`{command}`, {datetime.date.today()}\n\n{text}\n")


if __name__ == "__main__":
    main()
