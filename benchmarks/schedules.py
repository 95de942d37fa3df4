"""Schedules side by side on the real engine: same prompts, same lengths, one call.

    python -m benchmarks.schedules --presets sync copris           # five pairs: about an hour
    python -m benchmarks.schedules --presets sync copris --pieces 4     # four runs of those
    python -m benchmarks.schedules --repetitions 1 --model runs/quickstart/sft     # learning, too
    python -m benchmarks.schedules --table                         # of the rows there are

Time. Every trajectory's response length is forced (a recorded length per trajectory id), once
long-tailed (`tail`) and once equal for all (`uniform`), the negative control: there asynchrony must
show no gain. The model is the quickstart's architecture with random weights: with forced lengths
the time does not depend on its content. Everything else is the real run: SGLang, Megatron
under torchrun. All figures are per optimizer step of the same number of trajectories: a batch of
`rapid` is H times as large and is taken in H minibatches.

Equal work. Schedules are compared by trained tokens for each second in which requests may run. A
step's seconds are not comparable: the same number of trajectories are other ones, and of another
length, where a schedule takes those that end first and continues the rest. That evens out over a
run, not over its first steps, which are not measured.

Learning. With --model, every schedule also trains that (fine-tuned) model on the quickstart's own
batches with natural lengths, on equal samples: reward, held-out accuracy, ESS, and all times again
(`natural`).

Sizes. On a CPU core a decode step of this model costs about 4.6 ms and 0.1 to 0.2 ms more for each
running request. At the default of 32 requests the constant part still counts, as it does on a GPU,
where decode is bound by memory; with hundreds of requests a CPU is bound by arithmetic, an idle
slot costs nothing, and no schedule can gain.

Repetitions. The schedules alternate, each repetition runs all of them once, and a ratio is of two
runs of one repetition: the machine's speed changes within minutes. Ratios that spread by more than
25 % of their median are void, and printed as such: the machine was not quiet. Every run appends its
row to --rows; runs that have a row there are not made again, so the comparison can be made in
pieces.

Prints markdown and, with --out, writes it with the command and the date.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import command_line
from benchmarks.quickstart_adam import quickstart_adam
from benchmarks.rows import append, missing, read, spread
from megatron_async.config import RunConfig, build_config
from megatron_async.config.load import merge
from megatron_async.launcher.devices import split_of_this_machine
from megatron_async.launcher.supervisor import supervise
from megatron_async.models.tiny_model import build_tiny_model
from megatron_async.run_directory import RunDirectory
from megatron_async.telemetry.metrics import read_metrics

ROOT = Path(__file__).parents[1]
MOST_SPREAD = 0.25
RAPID_UPDATES = 4
GROUP = 8
SIZES = (
    *("warm_up", "steps", "groups", "concurrency", "longest"),
    *("learning_steps", "learning_groups", "learning_concurrency"),
)
PRESETS = ["sync", "rapid", "copris", "pipeline", "async"]


@dataclass(frozen=True)
class Row:
    """Means over the measured updates of one run; times are per optimizer step."""

    lengths: str
    preset: str
    trained_tokens: float
    rollout_seconds: float
    step_seconds: float
    slots_idle: float
    trainer_idle: float
    resumed: float
    lag_mean: float
    lag_max: float
    ess: float
    reward: float
    accuracy: float

    @property
    def per_rollout_second(self) -> float:
        """Trained tokens for each second in which requests may run."""
        return self.trained_tokens / self.rollout_seconds

    @property
    def per_second(self) -> float:
        """Trained tokens for each second of the run."""
        return self.trained_tokens / self.step_seconds


@dataclass(frozen=True)
class Result:
    """A run and the repetition that it belongs to."""

    repetition: int
    row: Row


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
    steps = (options.learning_steps if natural else options.steps) + options.warm_up
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
        "telemetry": {"progress": "off", "trackers": []},
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


def measure(config: RunConfig, kind: str, warm_up: int) -> Row:
    """One whole run."""
    directory = RunDirectory.create(config)
    supervise(config, directory, split_of_this_machine(config))
    lines = read_metrics(directory.metrics_file)
    evaluations = read_metrics(directory.metrics_file, kind="eval")
    schedule = config.schedule
    return row_of(kind, schedule.preset, schedule.updates_per_batch, warm_up, lines, evaluations)


def row_of(
    kind: str,
    preset: str,
    updates: int,
    warm_up: int,
    lines: Sequence[dict[str, Any]],
    evaluations: Sequence[dict[str, Any]],
) -> Row:
    """The means over a run's metrics without the first `warm_up` updates."""
    rewards = [line["rollout/reward_mean"] for line in lines]
    lines = lines[warm_up // updates :]

    def mean(name: str) -> float:
        return float(np.mean([line[name] for line in lines]))

    whole = sum(line["time/step"] for line in lines)
    return Row(
        kind,
        preset,
        trained_tokens=mean("train/trained_tokens") / updates,
        rollout_seconds=mean("rollout/seconds") / updates,
        step_seconds=mean("time/step") / updates,
        slots_idle=1 - mean("rollout/slots_busy_share"),
        trainer_idle=sum(line["time/wait_for_batch"] for line in lines) / whole,
        resumed=mean("rollout/resumed_share"),
        lag_mean=mean("rollout/lag_mean"),
        lag_max=max(line["rollout/lag_max"] for line in lines),
        ess=mean("off_policy/ess"),
        reward=float(np.mean(rewards[-max(1, len(rewards) // 4) :])),
        accuracy=evaluations[-1]["eval/accuracy"],
    )


def time_table(rows: Sequence[Result]) -> str:
    """Markdown: medians and ranges; ratios are against `sync` of the same repetition."""
    out = [
        "| lengths | schedule | runs | trained tokens/step | trained tokens/rollout s | x sync "
        "| trained tokens/s | x sync | rollout s/step | whole s/step "
        "| slots idle | trainer idle | resumed | lag mean / max |",
        "|---|---|--:|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    void = []
    sync = {(r.row.lengths, r.repetition): r.row for r in rows if r.row.preset == "sync"}
    for lengths, preset in dict.fromkeys((r.row.lengths, r.row.preset) for r in rows):
        of = [r for r in rows if (r.row.lengths, r.row.preset) == (lengths, preset)]
        bases = [(sync.get((lengths, r.repetition)), r.row) for r in of]
        pairs = [(base, row) for base, row in bases if base is not None]
        ratios = [row.per_rollout_second / base.per_rollout_second for base, row in pairs]
        whole = [row.per_second / base.per_second for base, row in pairs]
        apart = (max(ratios) - min(ratios)) / float(np.median(ratios)) if ratios else 0.0
        if apart > MOST_SPREAD:
            void.append(
                f"**Void**: the pairs of `{preset}` on `{lengths}` spread by {apart:.0%} of their "
                f"median, and at most {MOST_SPREAD:.0%} counts. Measure again on a quiet machine."
            )
        own = [r.row for r in of]
        out.append(
            f"| {lengths} | {preset} | {len(of)} | {spread([r.trained_tokens for r in own], 0)} "
            f"| {spread([r.per_rollout_second for r in own], 0)} "
            f"| {'void: ' if apart > MOST_SPREAD else ''}{spread(ratios)} "
            f"| {spread([r.per_second for r in own], 0)} | {spread(whole)} "
            f"| {spread([r.rollout_seconds for r in own])} "
            f"| {spread([r.step_seconds for r in own])} "
            f"| {np.median([r.slots_idle for r in own]):.0%} "
            f"| {np.median([r.trainer_idle for r in own]):.0%} "
            f"| {np.median([r.resumed for r in own]):.0%} "
            f"| {np.median([r.lag_mean for r in own]):.2f} / {max(r.lag_max for r in own):.0f} |"
        )
    return "\n".join(out) + "".join(f"\n\n{sentence}" for sentence in void)


def learning_table(rows: Sequence[Result], samples: int) -> str:
    """Markdown; every run has trained on the same number of trajectories."""
    out = [
        f"Equal samples: {samples:,} trajectories each.",
        "",
        "| schedule | run | reward, last quarter | held-out accuracy after | rollout s/step "
        "| whole s/step | trained tokens/s | trainer idle | lag mean / max | ESS |",
        "|---|--:|---|---|---|---|---|---|---|---|",
    ]
    out += [
        f"| {r.preset} | {result.repetition + 1} | {r.reward:.3f} | {r.accuracy:.1%} "
        f"| {r.rollout_seconds:.2f} "
        f"| {r.step_seconds:.2f} | {r.per_second:,.0f} | {r.trainer_idle:.0%} "
        f"| {r.lag_mean:.2f} / {r.lag_max:.0f} | {r.ess:.3f} |"
        for result in rows
        for r in [result.row]
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


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; the process's own arguments by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--presets", nargs="+", default=PRESETS)
    parser.add_argument("--lengths", nargs="*", default=["tail", "uniform"])
    parser.add_argument("--warm-up", type=int, default=12, help="updates that are not measured")
    parser.add_argument("--steps", type=int, default=24, help="measured updates of each run")
    parser.add_argument("--groups", type=int, default=4, help="B, groups of 8 per update")
    parser.add_argument("--concurrency", type=int, default=32, help="N' of the others")
    parser.add_argument("--longest", type=int, default=1024, help="longest response, tokens")
    parser.add_argument("--model", type=Path, help="fine-tuned quickstart model: learning too")
    parser.add_argument("--learning-steps", type=int, default=8, help="updates after warm-up")
    parser.add_argument("--learning-groups", type=int, default=32, help="B of the learning runs")
    parser.add_argument("--learning-concurrency", type=int, default=96, help="N' of these")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--pieces", type=int, default=1000, help="make at most so many runs")
    parser.add_argument("--rows", type=Path, default=ROOT / "benchmarks/results/schedules.jsonl")
    parser.add_argument("--table", action="store_true", help="only print the table of the rows")
    parser.add_argument("--out", type=Path, help="write the tables here too")
    return parser.parse_args(arguments)


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """What two rows must have in common to be compared."""
    return {name: getattr(options, name) for name in SIZES}


def pieces(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The keys of all runs, in the order in which they are made."""
    kinds = [*options.lengths, *(["natural"] if options.model is not None else [])]
    return [
        {"repetition": repetition, "lengths": kind, "preset": preset, "sizes": sizes_of(options)}
        for repetition in range(options.repetitions)
        for kind in kinds
        for preset in options.presets
    ]


def main() -> None:
    options = parsed()
    recorded = read(options.rows)
    todo = [] if options.table else missing(pieces(options), recorded)[: options.pieces]
    base = quickstart_adam()
    for key in todo:
        with tempfile.TemporaryDirectory(prefix="schedules-") as scratch:
            model = Path(scratch) / "model"
            build_tiny_model(model, seed=1)
            kind = key["lengths"]
            overrides = settings_of(key["preset"], kind, model, Path(scratch), options)
            row = measure(build_config(merge(base, overrides)), kind, options.warm_up)
        append(options.rows, {**key, **asdict(row), "date": f"{datetime.date.today()}"})
        print(row, file=sys.stderr, flush=True)
    same = [row for row in read(options.rows) if row["sizes"] == sizes_of(options)]
    text = tables(same, options)
    print(text)
    if options.out is not None:
        command = command_line("benchmarks.schedules")
        options.out.write_text(f"`{command}`, {datetime.date.today()}\n\n{text}\n")


def tables(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> str:
    """Both tables, of the rows that were made with the sizes of `options`."""
    names = [field.name for field in fields(Row)]
    results = [
        Result(row["repetition"], Row(**{name: row[name] for name in names})) for row in rows
    ]
    timed = [result for result in results if result.row.lengths != "natural"]
    learned = [result for result in results if result.row.lengths == "natural"]
    parts = [describe_lengths(options.longest), time_table(timed)] if timed else []
    if learned:
        updates = options.learning_steps + options.warm_up
        parts.append(learning_table(learned, updates * options.learning_groups * GROUP))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main()
