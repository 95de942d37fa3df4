"""Schedules side by side on the real engine: same prompts, same lengths, one call.

    python -m benchmarks.schedules --model runs/quickstart/sft     # everything: 25 minutes
    python -m benchmarks.schedules --presets sync copris           # times of these two only

Time. Every trajectory's response length is forced (a recorded length per trajectory id), once
long-tailed (`tail`) and once equal for all (`uniform`), the negative control: there asynchrony must
show no gain. The model is the quickstart's architecture with random weights: with forced lengths
the time does not depend on its content. Everything else is the real run: Ray, SGLang, Megatron
under torchrun. All figures are per optimizer step of the same number of trajectories: a batch of
`rapid` is H times as large and is taken in H minibatches.

Learning. With --model, every schedule also trains that (fine-tuned) model on the quickstart's own
batches with natural lengths, on equal samples: reward, held-out accuracy, ESS, and all times again
(`natural`).

Sizes. On a CPU core a decode step of this model costs about 4.6 ms and 0.1 to 0.2 ms more for each
running request. At the default of 32 requests the constant part still counts, as it does on a GPU,
where decode is bound by memory; with hundreds of requests a CPU is bound by arithmetic, an idle
slot costs nothing, and no schedule can gain.

Prints markdown and, with --out, writes it with the command and the date.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import command_line
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge, read_yaml
from megatron_async.launcher.devices import split_of_this_machine
from megatron_async.launcher.supervisor import Supervisor
from megatron_async.run_directory import RunDirectory
from megatron_async.tasks.tiny_model import build_tiny_model
from megatron_async.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]
WARM_UP_UPDATES = 4
RAPID_UPDATES = 4
GROUP = 8
PRESETS = ["sync", "rapid", "copris", "pipeline", "async"]


@dataclass(frozen=True)
class Row:
    """Means over the measured updates of one run; times are per optimizer step."""

    lengths: str
    preset: str
    rollout_seconds: float
    step_seconds: float
    tokens_per_second: float
    slots_idle: float
    trainer_idle: float
    resumed: float
    lag_mean: float
    lag_max: float
    ess: float
    reward: float
    accuracy: float


def forced_lengths(kind: str, count: int, longest: int) -> list[int]:
    """`tail`: log-normal with the given longest value; `uniform`: all equal to the tail's mean."""
    rng = np.random.default_rng(0)
    tail = np.exp(rng.normal(0.0, 1.0, count))
    tail = np.clip(np.round(tail / np.quantile(tail, 0.995) * longest), 8, longest).astype(int)
    if kind == "tail":
        return [int(length) for length in tail]
    return [round(float(tail.mean()))] * count


def settings_of(
    preset: str, kind: str, model: Path, root: Path, options: argparse.Namespace
) -> dict[str, Any]:
    """What differs from the quickstart's settings."""
    natural = kind == "natural"
    groups = options.learning_groups if natural else options.groups
    concurrency = options.learning_concurrency if natural else options.concurrency
    updates = RAPID_UPDATES if preset == "rapid" else 1
    steps = (options.learning_steps if natural else options.steps) + WARM_UP_UPDATES
    batch = groups * updates
    settings = {
        "name": f"{preset}-{kind}",
        "root": str(root),
        "steps": steps // updates,
        "model": {"path": str(options.model if natural else model)},
        "schedule": {
            "preset": preset,
            "groups_per_batch": batch,
            "group_size": GROUP,
            # The synchronous loops have their whole batch in flight; the others N'.
            "concurrency": batch * GROUP if preset in ("sync", "rapid") else concurrency,
            "updates_per_batch": updates,
        },
        "checkpoint": {"every_steps": 10_000, "export_hf": False},
        "telemetry": {"progress": "off", "tensorboard": False},
    }
    if natural:
        return settings
    lengths = forced_lengths(kind, 4096, options.longest)
    forced = {
        "sampling": {"max_new_tokens": options.longest},
        "engines": {"max_total_tokens": 131072},
        "eval": {"prompts": 8},
        "experiment": {"forced_lengths": lengths},
    }
    return merge(settings, forced)


def measure(config: RunConfig, kind: str) -> Row:
    """One whole run."""
    directory = RunDirectory.create(config)
    Supervisor(config, directory, split_of_this_machine(config)).run()
    updates = config.schedule.updates_per_batch
    lines = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    rewards = [line["rollout/reward_mean"] for line in lines]
    lines = lines[WARM_UP_UPDATES // updates :]

    def mean(name: str) -> float:
        return float(np.mean([line[name] for line in lines]))

    whole = sum(line["time/step"] for line in lines)
    return Row(
        kind,
        config.schedule.preset,
        rollout_seconds=mean("rollout/seconds") / updates,
        step_seconds=mean("time/step") / updates,
        tokens_per_second=sum(line["rollout/tokens"] for line in lines) / whole,
        slots_idle=1 - mean("rollout/slots_busy_share"),
        trainer_idle=sum(line["time/wait_for_batch"] for line in lines) / whole,
        resumed=mean("rollout/resumed_share"),
        lag_mean=mean("rollout/lag_mean"),
        lag_max=max(line["rollout/lag_max"] for line in lines),
        ess=mean("off_policy/ess"),
        reward=float(np.mean(rewards[-max(1, len(rewards) // 4) :])),
        accuracy=evaluations[-1]["eval/accuracy"],
    )


def time_table(rows: list[Row]) -> str:
    """Markdown; ratios are against `sync` of the same lengths."""
    out = [
        "| lengths | schedule | rollout s/step | x sync | whole s/step | x sync | tokens/s "
        "| x sync | slots idle | trainer idle | resumed | lag mean / max |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        base = next((r for r in rows if r.lengths == row.lengths and r.preset == "sync"), row)
        out.append(
            f"| {row.lengths} | {row.preset} | {row.rollout_seconds:.2f} "
            f"| {base.rollout_seconds / row.rollout_seconds:.2f} | {row.step_seconds:.2f} "
            f"| {base.step_seconds / row.step_seconds:.2f} | {row.tokens_per_second:,.0f} "
            f"| {row.tokens_per_second / base.tokens_per_second:.2f} | {row.slots_idle:.0%} "
            f"| {row.trainer_idle:.0%} | {row.resumed:.0%} "
            f"| {row.lag_mean:.2f} / {row.lag_max:.0f} |"
        )
    return "\n".join(out)


def learning_table(rows: list[Row], samples: int) -> str:
    """Markdown; every run has trained on the same number of trajectories."""
    out = [
        f"Equal samples: {samples:,} trajectories each.",
        "",
        "| schedule | reward, last quarter | held-out accuracy after | rollout s/step "
        "| whole s/step | tokens/s | trainer idle | lag mean / max | ESS |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {r.preset} | {r.reward:.3f} | {r.accuracy:.1%} | {r.rollout_seconds:.2f} "
        f"| {r.step_seconds:.2f} | {r.tokens_per_second:,.0f} | {r.trainer_idle:.0%} "
        f"| {r.lag_mean:.2f} / {r.lag_max:.0f} | {r.ess:.3f} |"
        for r in rows
    ]
    return "\n".join(out)


def describe_lengths(longest: int) -> str:
    """The forced lengths in one line."""
    tail = np.array(forced_lengths("tail", 4096, longest))
    uniform = forced_lengths("uniform", 4096, longest)[0]
    return (
        f"Forced lengths: `tail` has median {np.median(tail):.0f}, mean {tail.mean():.0f}, "
        f"99 % quantile {np.quantile(tail, 0.99):.0f}, longest {tail.max()} tokens; "
        f"`uniform` {uniform}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--lengths", nargs="*", default=["tail", "uniform"])
    parser.add_argument("--steps", type=int, default=8, help="measured updates of each run")
    parser.add_argument("--groups", type=int, default=4, help="B, groups of 8 per update")
    parser.add_argument("--concurrency", type=int, default=32, help="N' of the others")
    parser.add_argument("--longest", type=int, default=1024, help="longest response, tokens")
    parser.add_argument("--model", type=Path, help="fine-tuned quickstart model: learning too")
    parser.add_argument("--learning-steps", type=int, default=16, help="updates after warm-up")
    parser.add_argument("--learning-groups", type=int, default=32, help="B of the learning runs")
    parser.add_argument("--learning-concurrency", type=int, default=96, help="N' of these")
    parser.add_argument("--out", type=Path, help="write the tables here too")
    options = parser.parse_args()
    kinds = [*options.lengths, *(["natural"] if options.model is not None else [])]
    rows = []
    with tempfile.TemporaryDirectory(prefix="schedules-") as scratch:
        model = Path(scratch) / "model"
        build_tiny_model(model, seed=1)
        base = read_yaml(ROOT / "configs" / "quickstart.yaml")
        for kind in kinds:
            for preset in options.presets:
                overrides = settings_of(preset, kind, model, Path(scratch), options)
                rows.append(measure(build_config(merge(base, overrides)), kind))
                print(rows[-1], file=sys.stderr, flush=True)
    timed = [row for row in rows if row.lengths != "natural"]
    learned = [row for row in rows if row.lengths == "natural"]
    parts = [describe_lengths(options.longest), time_table(timed)] if timed else []
    if learned:
        updates = options.learning_steps + WARM_UP_UPDATES
        parts.append(learning_table(learned, updates * options.learning_groups * GROUP))
    text = "\n\n".join(parts)
    print(text)
    if options.out is not None:
        command = command_line("benchmarks.schedules")
        options.out.write_text(f"`{command}`, {datetime.date.today()}\n\n{text}\n")


if __name__ == "__main__":
    main()
