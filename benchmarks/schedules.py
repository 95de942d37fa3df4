"""Schedules side by side on the real engine: same prompts, same forced lengths, one call.

    python benchmarks/schedules.py                          # copris against sync
    python benchmarks/schedules.py --presets sync rapid copris pipeline async

Every trajectory's response length is forced (a recorded length per trajectory id), once long-tailed
and once uniform. Uniform lengths are the negative control: there asynchrony must show no gain.
The model is the quickstart's architecture with random weights: with forced lengths the time does
not depend on what it says. Everything else is the real run: Ray, SGLang, Megatron under torchrun.
Prints a markdown table and, with --out, writes it with the command and the date.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_async.config import build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.run.directory import RunDirectory
from megatron_async.run.supervisor import Supervisor
from megatron_async.tasks.tiny_model import build_tiny_model
from megatron_async.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]
WARM_UP_STEPS = 1
GROUP = 8


@dataclass(frozen=True)
class Row:
    """Means over the measured steps of one run."""

    lengths: str
    preset: str
    rollout_seconds: float
    step_seconds: float
    tokens_per_second: float
    slots_idle: float
    trainer_idle: float
    lag_mean: float
    lag_max: float
    ess: float


def forced_lengths(kind: str, count: int, longest: int) -> list[int]:
    """`tail`: log-normal with the given longest value; `uniform`: all equal to the tail's mean."""
    rng = np.random.default_rng(0)
    tail = np.exp(rng.normal(0.0, 1.0, count))
    tail = np.clip(np.round(tail / np.quantile(tail, 0.995) * longest), 8, longest).astype(int)
    if kind == "tail":
        return [int(length) for length in tail]
    return [round(float(tail.mean()))] * count


def measure(preset: str, kind: str, model: Path, root: Path, options: argparse.Namespace) -> Row:
    """One whole run of `options.steps` batches."""
    lengths = forced_lengths(kind, 4096, options.longest)
    batch = options.groups * GROUP
    # The synchronous loop has its whole batch in flight, as it would on a GPU; the others N'.
    concurrency = batch if preset in ("sync", "rapid") else options.concurrency
    settings = merge(
        read_yaml(ROOT / "configs" / "quickstart.yaml"),
        {
            "name": f"{preset}-{kind}",
            "root": str(root),
            "steps": options.steps + WARM_UP_STEPS,
            "model": {"path": str(model)},
            "schedule": {
                "preset": preset,
                "groups_per_batch": options.groups,
                "group_size": GROUP,
                "concurrency": concurrency,
                "updates_per_batch": 4 if preset == "rapid" else 1,
            },
            "sampling": {"max_new_tokens": options.longest},
            "engines": {"max_total_tokens": 131072},
            "eval": {"prompts": 8},
            "checkpoint": {"every_steps": 10_000, "export_hf": False},
            "telemetry": {"progress": "off", "tensorboard": False},
            "experiment": {"forced_lengths": lengths},
        },
    )
    config = build_config(settings)
    directory = RunDirectory.create(config)
    Supervisor(config, directory).run()
    lines = read_metrics(directory.metrics_file)[WARM_UP_STEPS:]

    def mean(name: str) -> float:
        return float(np.mean([line[name] for line in lines]))

    tokens = sum(line["rollout/tokens"] for line in lines)
    whole = sum(line["time/step"] for line in lines)
    return Row(
        kind,
        preset,
        rollout_seconds=mean("rollout/seconds"),
        step_seconds=mean("time/step"),
        tokens_per_second=tokens / whole,
        slots_idle=1 - mean("rollout/slots_busy_share"),
        trainer_idle=sum(line["time/wait_for_batch"] for line in lines) / whole,
        lag_mean=mean("rollout/lag_mean"),
        lag_max=max(line["rollout/lag_max"] for line in lines),
        ess=mean("off_policy/ess"),
    )


def table(rows: list[Row]) -> str:
    """Markdown; ratios are against `sync` of the same lengths."""
    out = [
        "| lengths | schedule | rollout s/step | x sync | whole s/step | x sync | tokens/s "
        "| x sync | slots idle | trainer idle | lag mean / max | ESS |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next((r for r in rows if r.lengths == row.lengths and r.preset == "sync"), row)
        out.append(
            f"| {row.lengths} | {row.preset} | {row.rollout_seconds:.2f} "
            f"| {base.rollout_seconds / row.rollout_seconds:.2f} | {row.step_seconds:.2f} "
            f"| {base.step_seconds / row.step_seconds:.2f} | {row.tokens_per_second:,.0f} "
            f"| {row.tokens_per_second / base.tokens_per_second:.2f} | {row.slots_idle:.0%} "
            f"| {row.trainer_idle:.0%} | {row.lag_mean:.2f} / {row.lag_max:.0f} "
            f"| {row.ess:.3f} |"
        )
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=["sync", "copris"])
    parser.add_argument("--lengths", nargs="+", default=["tail", "uniform"])
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each run")
    parser.add_argument("--groups", type=int, default=12, help="B, groups of 8 per batch")
    parser.add_argument("--concurrency", type=int, default=96, help="N' of the others")
    parser.add_argument("--longest", type=int, default=512, help="longest response, tokens")
    parser.add_argument("--out", type=Path, help="write the table here too")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="schedules-") as scratch:
        model = Path(scratch) / "model"
        build_tiny_model(model, seed=1)
        for kind in options.lengths:
            for preset in options.presets:
                rows.append(measure(preset, kind, model, Path(scratch), options))
                print(rows[-1], file=sys.stderr, flush=True)
    text = table(rows)
    print(text)
    if options.out is not None:
        command = "python benchmarks/schedules.py " + " ".join(sys.argv[1:])
        options.out.write_text(f"`{command}`, {datetime.date.today()}\n\n{text}\n")


if __name__ == "__main__":
    main()
